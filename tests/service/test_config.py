"""Settings are refused whole, before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stemserve.service.config.error import ConfigError
from stemserve.service.config.server import (
    ServerConfig,
    ServiceConfig,
    SpeculationConfig,
    WorkerConfig,
    default_model_cache,
)
from stemserve.service.config.tracing import TracingConfig

PEM = Path("none.pem")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ServerConfig(port=-1), "port -1 is not in 0 .. 65535"),
        (lambda: ServerConfig(port=7, health_port=7), "the ports must differ"),
        (lambda: ServerConfig(drain_s=float("nan")), "drain_s nan"),
        (lambda: ServerConfig(max_connection_age_s=-1), "max_connection_age_s -1 is not a number"),
        (lambda: ServerConfig(default_deadline_s=1e9), "from 0 to 1000000"),
        (lambda: ServerConfig(keepalive_s=0), "keepalive_s must be more than 0"),
        (lambda: ServerConfig(max_ping_strikes=-1), "max_ping_strikes -1 must be 0 or more"),
        (lambda: ServerConfig(max_stream_delay_ms=1e4), "10000.0 is not in 0 .. 1000"),
        (lambda: WorkerConfig(load_format="pickle"), "'pickle' is not one of auto, dummy"),
        (lambda: WorkerConfig(dtype="int3"), "'int3' is not one of auto, float32"),
        (lambda: WorkerConfig(device="tpu"), "'tpu' is not one of auto, cpu, cuda"),
        (lambda: WorkerConfig(kernel="magic"), "'magic' is not one of naive, split"),
        (lambda: WorkerConfig(threads=0), "threads 0 must be at least 1"),
        (lambda: SpeculationConfig(draft_tokens=33), "draft_tokens 33 is not in 0 .. 32"),
        (lambda: SpeculationConfig(least_gain=-1.0), "least_gain -1.0 is not in 0 .. 32"),
        (lambda: WorkerConfig(max_burst_steps=0), "max_burst_steps 0 must be at least 1"),
        (lambda: WorkerConfig(kernel_probe_rate=2.0), "kernel_probe_rate 2.0 is not in 0 .. 1"),
        (lambda: WorkerConfig(max_burst_ms=-1.0), "max_burst_ms -1.0 must not be negative"),
        (
            lambda: WorkerConfig(deterministic=True, kernel="naive"),
            "deterministic has its own attention",
        ),
        (lambda: WorkerConfig(kv_pages=5, kv_memory=5), "kv_pages or kv_memory, not both"),
        (lambda: WorkerConfig(kv_cache_dtype="int2"), "'int2' is not one of auto, fp8_e4m3"),
        (lambda: WorkerConfig(gpu_memory_utilization=1.5), "1.5 is not more than 0 and at most 1"),
        (
            lambda: WorkerConfig(deterministic=True, kv_cache_dtype="fp8_e4m3"),
            "deterministic needs kv_cache_dtype auto",
        ),
        (
            lambda: WorkerConfig(start_timeout_s=0),
            "start_timeout_s 0 is not more than 0 and at most 1000000",
        ),
        (
            lambda: WorkerConfig(step_timeout_s=0),
            "and at most step_timeout_s, 0",
        ),
        (
            lambda: WorkerConfig(address="a:1", tls_ca=PEM, tls_certificate=PEM),
            "tls_certificate and tls_private_key go together",
        ),
        (
            lambda: WorkerConfig(address="a:1", tls_certificate=PEM, tls_private_key=PEM),
            "tls_certificate needs tls_ca",
        ),
        (lambda: WorkerConfig(tls_ca=PEM), "tls_ca needs address HOST:PORT"),
        (lambda: WorkerConfig(address="a:1", tls_ca=PEM), "tls_ca none.pem is not a file"),
        (lambda: ServiceConfig(log_format="xml"), "'xml' is not one of text, json"),
        (lambda: TracingConfig(otlp_endpoint="collector:4317"), "is not http://HOST:PORT"),
        (lambda: TracingConfig(sample_ratio=1.5), "sample_ratio 1.5 is not in 0 .. 1"),
        (lambda: TracingConfig(sample_ratio=float("nan")), "sample_ratio nan is not in 0 .. 1"),
        (lambda: TracingConfig(max_steps=0), "max_steps 0 is not in 1 .. 10000"),
        (lambda: TracingConfig(max_queued_spans=10**9), "max_queued_spans 1000000000 is not in"),
        (lambda: TracingConfig(export_timeout_s=0), "export_timeout_s 0 is not in 0 .. 600"),
        (lambda: TracingConfig(flush_s=-1), "flush_s -1 is not in 0 .. 600"),
        (lambda: ServiceConfig(log_level="loud"), "'loud' is not one of debug, info"),
    ],
)
def test_a_setting_that_cannot_work_is_named(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


def test_any_number_of_ports_may_be_chosen_by_the_system() -> None:
    assert ServerConfig(port=0, health_port=0, metrics_port=0).port == 0


def test_the_worker_logs_as_the_service_does() -> None:
    words = WorkerConfig().command(
        Path("/models/m"), max_step_tokens=64, log_level="info", log_format="json"
    )
    assert words[words.index("--log-format") + 1] == "json"


def test_the_worker_is_told_only_what_was_asked_for() -> None:
    config = WorkerConfig(dtype="float32", threads=2)
    words = config.command(Path("/models/m"), max_step_tokens=64, log_level="info")
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--model": "/models/m",
        "--load-format": "auto",
        "--dtype": "float32",
        "--threads": "2",
        "--max-step-tokens": "64",
        "--log-level": "info",
    }


def test_the_worker_is_told_of_its_memory() -> None:
    config = WorkerConfig(gpu_memory_utilization=0.5, kv_cache_dtype="fp8_e4m3")
    words = config.command(Path("/models/m"), max_step_tokens=64, log_level="info")
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.5"
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8_e4m3"


def test_the_worker_is_told_how_many_steps_may_come_at_once() -> None:
    words = WorkerConfig(max_burst_steps=4).command(
        Path("/models/m"), max_step_tokens=64, log_level="info"
    )
    assert words[words.index("--max-burst-steps") + 1] == "4"


def test_a_deterministic_worker_is_told_so() -> None:
    words = WorkerConfig(deterministic=True).command(
        Path("/models/m"), max_step_tokens=64, log_level="info"
    )
    assert words[-1] == "--deterministic"


def test_the_cache_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_model_cache() == Path("/somewhere/stemserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_model_cache() == Path.home() / ".cache" / "stemserve"
