"""What the chart refuses, and the settings that it writes for the server."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
from helm_python.chart import Chart
from helm_python.errors import HelmError
from tests.deploy.chart import CHART, MATRIX, Values, render, the
from typer.testing import CliRunner

from stemserve.service.commands.app import app
from stemserve.service.config.access import TenantConfig
from stemserve.service.config.sources import Setting, known_keys, read_settings, settings_text

REFUSED: Mapping[str, tuple[Values, str]] = {
    "unknown value": ({"replica": 2}, "replica"),
    "unknown setting": ({"settings": {"worker": {"kv_pagse": 3}}}, "kv_pagse"),
    "setting of the chart": ({"settings": {"server": {"port": 1}}}, "port"),
    "latest": ({"image": {"tag": "latest"}}, "tag"),
    "two GPUs": ({"gpu": {"count": 2}}, "gpu"),
    "kernel": ({"settings": {"worker": {"kernel": "fastest"}}}, "kernel"),
    "pickled weights": ({"model": {"download": {"files": [
        {"name": "a.bin", "url": "https://x/a.bin", "sha256": "0" * 64}]}}}, "name"),
    "weights without a hash": ({"model": {"download": {"files": [
        {"name": "a.gguf", "url": "https://x/a.gguf"}]}}}, "sha256"),
    "path upwards": ({"model": {"path": "../etc"}}, "path"),
    "root": ({"podSecurity": {"user": 0}}, "user"),
    "balance below the mean": ({"router": {"hashBalanceFactor": 50}}, "hashBalanceFactor"),
    "drain beyond the grace": ({"drain": {"seconds": 150}}, "terminationGracePeriodSeconds"),
    "open without saying so": ({"auth": {"allowInsecure": False}}, "allowInsecure"),
    "keys without tenants": ({"auth": {"mode": "keys"}}, "tenants"),
    "keys in the clear": (
        {"auth": {"mode": "keys", "allowInsecure": False}, "tenants": {"a": {}}}, "in the clear"),
    "tenants without keys": ({"tenants": {"a": {}}}, "auth.mode"),
    "certificates behind a router": (
        {"auth": {"mode": "mtls"}, "tenants": {"a": {}},
         "tls": {"secretName": "s", "demandClientCertificate": True}}, "router.mode none"),
    "certificates for nobody": ({"certificates": {"issuer": {"name": "a"}}}, "tls.secretName"),
    "no gateway": ({"router": {"mode": "gateway"}}, "gateway.name"),
    "gateway before TLS": (
        {"router": {"mode": "gateway"}, "gateway": {"name": "a"}, "tls": {"secretName": "b"}},
        "tls.secretName"),
    "volume without a claim": ({"model": {"source": "pvc"}}, "existingClaim"),
    "keda without an address": ({"autoscaling": {"kind": "keda"}}, "prometheusAddress"),
    "weights of no image": ({"model": {"source": "image"}}, "model.image"),
    "weights that may change": ({"model": {"source": "image", "image": "a:latest"}}, "image"),
    "routers beyond the most": (
        {"router": {"replicas": 5, "autoscaling": {"enabled": True}}}, "router.replicas"),
    "more at least than at most": ({"autoscaling": {"min": 5}}, "autoscaling.min"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_cannot_work_are_refused_by_name(case: str) -> None:
    values, named = REFUSED[case]
    with pytest.raises(HelmError, match=named):
        render(values)


NOT_HERE = ("tls.", "auth.", "tenants")  # the chart's own values


def settings_file(values: Values) -> str:
    name = values.get("fullnameOverride", "x-stemserve")
    text: str = the(render(values), "ConfigMap", name)["data"]["stemserve.toml"]
    return text


@pytest.mark.parametrize("row", MATRIX)
def test_the_server_takes_the_settings(row: str, tmp_path: Path) -> None:
    text = settings_file(MATRIX[row])
    for name in ("stemserve-tls", "stemserve-jwks", "stemserve-worker-tls"):  # must be there
        text = text.replace(f"/etc/{name}", str(tmp_path))
    for name in ("tls.crt", "tls.key", "ca.crt", "keys.json"):
        (tmp_path / name).touch()
    file = tmp_path / "stemserve.toml"
    file.write_text(text)
    flags = {"worker.address": Setting(value="worker:50061", source="--worker")}
    in_groups = MATRIX[row].get("workload") == "LeaderWorkerSet"
    settings = read_settings(file=file, environment={}, flags=flags if in_groups else {})
    assert settings.config.server.host == "0.0.0.0"
    assert settings.config.server.drain_s == 120
    assert settings_text(settings)
    given = sum(len(table) for table in tables(tomllib.loads(text)))
    assert len(settings.sources) == given + in_groups


def tables(tree: dict[str, Any]) -> list[list[str]]:
    """The keys of each table that hold values."""
    parts = [cast(dict[str, Any], value) for value in tree.values() if isinstance(value, dict)]
    below = [table for part in parts for table in tables(part)]
    own = [key for key, value in tree.items() if not isinstance(value, dict) or not value]
    return [own, *below]


def test_values_reach_the_settings() -> None:
    settings = tomllib.loads(settings_file(MATRIX["volume"]))
    assert settings["model"] == "/models/Qwen3-0.6B"
    assert settings["log_level"] == "debug" and settings["log_format"] == "json"
    assert settings["tracing"] == {"otlp_endpoint": "http://collector:4317", "sample_ratio": 0.05}
    assert settings["server"]["max_connection_age_s"] == 300.5
    assert settings["worker"] == {
        "device": "cuda",
        "start_timeout_s": 1200,
        "kv_memory": "20G",
        "gpu_memory_utilization": 0.85,
        "deterministic": True,
    }
    assert settings["limits"] == {"max_items": 2000, "max_queued_tokens": 8_000_000}
    assert tomllib.loads(settings_file(MATRIX["download"]))["model"] == "/models/m.gguf"
    assert tomllib.loads(settings_file(MATRIX["node folder"]))["model"] == "/models/a/b.gguf"
    issuer = tomllib.loads(settings_file(MATRIX["tokens"]))["auth"]["jwt"]["issuer"]
    assert issuer == 'https://issuer/"quoted"'
    assert tomllib.loads(settings_file(MATRIX["cpu"]))["worker"]["device"] == "cpu"


def test_the_schema_knows_every_setting_of_the_server() -> None:
    with Chart.load(CHART) as chart:
        schema: Any = chart.schema
    set_here = {
        *("model", "model_cache", "worker.address", "worker.device"),
        "worker.start_timeout_s",  # probes.startupSeconds
        *(f"worker.tls_{name}" for name in ("ca", "certificate", "private_key")),
        *(f"server.{name}" for name in ("host", "port", "health_port", "metrics_port")),
        *("server.drain_s", "server.drain_delay_s"),
    }
    expected = {key for key in known_keys() if not key.startswith(NOT_HERE)}
    settings = schema["properties"]["settings"]["properties"]
    (limits,) = settings.pop("limits")["patternProperties"]
    known = {key for key in expected if re.fullmatch(f"limits.{limits[1:-1]}", key)}
    for name, part in settings.items():
        known |= {f"{name}.{key}" for key in part["properties"]} if "properties" in part else {name}
    assert known == expected - set_here
    tenant = schema["properties"]["tenants"]["additionalProperties"]["properties"]
    assert set(tenant) == {item.name for item in fields(TenantConfig)}


def test_every_value_is_in_the_schema_and_every_object_is_strict() -> None:
    with Chart.load(CHART) as chart:
        schema: Any = chart.schema
        values = chart.values
    assert set(values) == set(schema["properties"]) - {"global"}
    loose = {path for path, part in objects_of(schema) if "additionalProperties" not in part}
    assert loose == {"affinity", "tolerations", "env.valueFrom", "global", "networkPolicy.clients",
                     "networkPolicy.monitoring", "networkPolicy.extraEgress",
                     "leaderWorkerSet.leader.affinity",
                     "leaderWorkerSet.leader.tolerations"}  # fmt: skip


def objects_of(part: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every schema of an object with its path; items of a list have the list's."""
    found = [(path, part)] if part.get("type") == "object" else []
    for name, below in part.get("properties", {}).items():
        found += objects_of(below, f"{path}.{name}" if path else name)
    return found + (objects_of(part["items"], path) if "items" in part else [])


def test_helm_test_makes_calls_that_the_command_line_knows() -> None:
    pod = the(render({}), "Pod", "x-stemserve-test")
    calls = [part["args"] for part in pod["spec"]["containers"] if "args" in part]
    assert [words[0] for words in calls] == ["generate", "score"]
    for words in calls:
        assert words[1] == "--server=x-stemserve.ns.svc:50051"
        done = CliRunner().invoke(app, [*words[:1], "--server=127.0.0.1:1", *words[2:]])
        assert done.exit_code == 1 and "127.0.0.1:1" in done.output, done.output
