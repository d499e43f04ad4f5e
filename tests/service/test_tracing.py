"""Tracing as a server has it from its start to its end."""

import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry
from tests.service.otlp_receiver import otlp_receiver

from stemserve.service.config.error import ConfigError
from stemserve.service.config.server import ServiceConfig
from stemserve.service.config.tracing import TracingConfig
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.tracing.tracing import tracing

ON = ServiceConfig(tracing=TracingConfig(otlp_endpoint="http://127.0.0.1:4317"))


def test_without_an_endpoint_nothing_is_traced() -> None:
    with tracing(ServiceConfig(), Metrics(CollectorRegistry()), lambda: 0.0) as tracer:
        assert tracer is None


def test_an_end_waits_no_longer_than_the_drain_has_left() -> None:
    """For a receiver that does not answer."""
    with otlp_receiver() as receiver:
        receiver.open.clear()
        config = TracingConfig(otlp_endpoint=receiver.endpoint, flush_s=300, export_timeout_s=300)
        registry = CollectorRegistry()
        ends_s = time.monotonic() + 0.2
        with tracing(ServiceConfig(tracing=config), Metrics(registry), lambda: ends_s) as tracer:
            assert tracer is not None
            trace = tracer.begin("stemserve.v1.Info/GetLoad", None, time.monotonic())
            assert trace is not None
            tracer.end(trace, "OK", "")
        assert time.monotonic() < ends_s + 20
        labels = {"outcome": "stopped"}
        assert registry.get_sample_value("stemserve_trace_spans_total", labels) == 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "stemserve.service.tracing.otlp_export", raising=False)
    with (
        pytest.raises(ConfigError, match=r"install stemserve\[tracing\]"),
        tracing(ON, Metrics(CollectorRegistry()), lambda: 0.0),
    ):
        pass


def test_a_server_without_tracing_loads_none_of_its_libraries() -> None:
    code = "import sys, stemserve.service.main; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
