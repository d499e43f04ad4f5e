"""A real Prometheus scrapes a real server under a small load: rules and panels have data."""

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from tests.deploy.expressions import (
    RULES,
    exported,
    filled,
    names,
    panel_expressions,
    rule_expressions,
)
from tests.e2e.conftest import Started, start_server, stemserve_command
from tests.service.otlp_receiver import Receiver, otlp_receiver

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError

__all__ = ["start_server", "stemserve_command"]
LOAD_S = 6.0
PATIENCE_S = 30.0
INTERVAL = "20s"
# What a CPU server without faults has no series of.
ELSEWHERE = ("DCGM_", "stemserve_kernel_fallbacks_total")


class Queries:
    """Of a Prometheus server."""

    def __init__(self, port: int) -> None:
        self._root = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        with urlopen(f"{self._root}/{path}?{urlencode(parameters)}", timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def numbers(self, expression: str) -> list[float]:
        data = self.get("query", query=expression)
        assert data["resultType"] == "vector"
        return [number for s in data["result"] if (number := float(s["value"][1])) == number]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return cast(int, free.getsockname()[1])


def configuration(folder: Path, metrics_port: int) -> Path:
    rules: Any = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group.pop("interval", None)
    (folder / "rules.yaml").write_text(json.dumps(rules))
    target = {"targets": [f"127.0.0.1:{metrics_port}"]}
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [
            {"job_name": "stemserve", "scrape_timeout": "400ms", "static_configs": [target]}
        ],
    }
    file = folder / "prometheus.yaml"
    file.write_text(json.dumps(config))
    return file


async def load(port: int) -> None:
    """Scores and generations over one prefix, and a call that is refused."""
    async with Client(f"127.0.0.1:{port}", timeout_s=30.0) as client:
        end = time.monotonic() + LOAD_S
        number = 0
        while time.monotonic() < end:
            number += 1
            score = inference_pb2.ScoreRequest(items=[f"item {number}", "other"])
            score.contexts.add(text="A text that all of the calls have in common. " * 3)
            score.log_likelihood.SetInParent()
            await client.score_request(score)
            generate = inference_pb2.GenerateRequest(
                prompt=inference_pb2.Context(text=f"Once upon a time {number % 3}"),
                max_new_tokens=6,
                ignore_eos=True,
                n=2,
            )
            async for _ in client.generate(generate):
                pass
            with pytest.raises(ClientError):
                await client.score_request(inference_pb2.ScoreRequest(items=["a"]))
            await asyncio.sleep(0.1)  # time for a probe


@pytest.fixture(scope="module")
def traces() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def queries(
    prometheus: str,
    start_server: Callable[..., Started],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    traces: Receiver,
) -> Iterator[Queries]:
    """After a load of a few seconds."""
    words: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
    words += ["--otlp-endpoint", traces.endpoint, "--kernel-probe-rate", 1]
    _, ports = start_server(*words)
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    command = [
        prometheus,
        f"--config.file={configuration(folder, ports['metrics'])}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            asyncio.run(load(ports["rpc"]))
            time.sleep(2)  # two more scrapes, and the rules over them
            yield Queries(port)
        finally:
            process.terminate()


def test_every_metric_of_the_page_is_scraped(queries: Queries) -> None:
    assert exported() <= set(queries.get("label/__name__/values"))


def test_exemplars_name_traces_that_the_receiver_has(queries: Queries, traces: Receiver) -> None:
    known = {span.trace_id.hex() for span in traces.spans}
    for name in ("request_duration", "request_queue", "time_to_first_token", "score_item"):
        series = queries.get(
            "query_exemplars",
            query=f"stemserve_{name}_seconds_bucket",
            start=str(time.time() - 60),
            end=str(time.time()),
        )
        found = {e["labels"]["trace_id"] for of_one in series for e in of_one["exemplars"]}
        assert found and found <= known, name


def test_every_panel_has_data(queries: Queries) -> None:
    left = list(panel_expressions())
    end = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < end:
        left = [e for e in left if not queries.numbers(filled(e.text, INTERVAL))]
        left = [e for e in left if not any(n.startswith(ELSEWHERE) for n in names(e.text))]
    assert not left


def test_every_rule_is_evaluated_without_an_error(queries: Queries) -> None:
    rules = [rule for group in queries.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(list(rule_expressions()))
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    for expression in rule_expressions():
        queries.get("query", query=expression.text)


def test_a_server_in_order_pages_nobody(queries: Queries) -> None:
    alerts = queries.get("alerts")["alerts"]
    firing = [a["labels"] for a in alerts if a["state"] == "firing"]
    assert [labels for labels in firing if labels["severity"] == "page"] == []
