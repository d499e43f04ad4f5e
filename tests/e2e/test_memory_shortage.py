"""A server whose worker may have hardly any more memory: every call gets its answer."""

import asyncio
import json
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.served import children, scrape

from stemserve.proto.v1.inference_pb2 import Context, GenerateRequest, LogLikelihood, SamplingParams
from stemserve.service.client import Client

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
MARGIN = 250 << 20  # bytes; a step of all its rows takes 480 MB more than the model


@pytest.fixture
def wide_model(tiny_model: Path, tmp_path: Path) -> Path:
    """Its steps take 240 KB a row."""
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 20_000}))
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    return tmp_path


def limit_memory(pid: int, margin: int | None) -> None:
    """What a process may write to; address space that malloc only reserves does not count."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    held = int(next(line for line in status if line.startswith("VmData:")).split()[1]) << 10
    limit = resource.RLIM_INFINITY if margin is None else held + margin
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


async def call(client: Client, number: int) -> tuple[list[float], list[int]]:
    """A call with many rows, and beside it a generation."""
    rng = np.random.default_rng(number)
    items = ["".join(map(chr, rng.integers(97, 123, 12))) for _ in range(170)]

    async def generated() -> list[int]:
        request = GenerateRequest(
            prompt=Context(text=items[0] * 3),
            max_new_tokens=6,
            ignore_eos=True,
            sampling=SamplingParams(temperature=1.0, seed=number),
        )
        steps = [step async for step in client.generate(request)]
        return [token for step in steps for news in step.news for token in news.token_ids]

    scores, tokens = await asyncio.gather(
        client.score(items, LogLikelihood(), contexts=[Context(text=items[1] * 9)]), generated()
    )
    return scores.scores.tolist(), tokens


async def test_a_worker_that_runs_short_of_memory_answers_every_call_the_same(
    start_server: StartServer, wide_model: Path
) -> None:
    server, ports = start_server(
        *("--model", wide_model, "--load-format", "dummy", "--threads", 1),
        *("--kv-pages", 300, "--max-step-tokens", 2048),
    )
    (worker,) = children(server.pid)
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=120.0) as client:
        limit_memory(worker, MARGIN)
        short = await asyncio.gather(*(call(client, number) for number in range(2)))
        assert (await scrape(ports))["stemserve_step_memory_shortages_total"] > 0
        assert (await client.load()).used_pages == 0
        limit_memory(worker, None)
        enough = await asyncio.gather(*(call(client, number) for number in range(2)))
    for found, expected in zip(short, enough, strict=True):
        np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
        assert found[1] == expected[1]
    assert children(server.pid) == [worker]
