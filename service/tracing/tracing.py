"""Tracing from the start of a server to its end, if it is configured."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import stemserve
from stemserve.service.config.error import ConfigError
from stemserve.service.config.server import ServiceConfig
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.tracing.tracer import Tracer

LEAST_FLUSH_S = 0.5  # where a drain has taken all its time


@contextmanager
def tracing(
    config: ServiceConfig, metrics: Metrics, drain_ends_s: Callable[[], float]
) -> Generator[Tracer | None]:
    """None where it is off. What has ended is sent before this ends, within what is left of the
    drain (`drain_ends_s`, monotonic). Raises ConfigError where the libraries are missing."""
    if not config.tracing.enabled:
        yield None
        return
    try:  # they are an extra
        from stemserve.service.tracing.otlp_export import otlp_export
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint needs more packages ({error}): install stemserve[tracing]"
        ) from error
    export = otlp_export(config.tracing, version=stemserve.__version__, note=metrics.spans)
    try:
        yield Tracer(config.tracing, export.put)
    finally:
        left_s = max(LEAST_FLUSH_S, drain_ends_s() - time.monotonic())
        export.close(min(config.tracing.flush_s, left_s))
