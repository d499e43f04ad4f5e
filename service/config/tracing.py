"""Where traces of calls go, and how many."""

from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import ConfigDict

from stemserve.service.config.error import ConfigError

MOST_STEPS = 10_000
MOST_SPANS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    # Of an OTLP receiver that speaks gRPC: http://HOST:PORT or, with TLS, https://; empty: off.
    otlp_endpoint: str = ""
    sample_ratio: float = 1.0  # of the calls for which the caller has not decided
    follow_callers: bool = True  # a caller that sends a traceparent decides for its calls
    max_steps: int = 64  # of a call, that get spans of their own
    max_queued_spans: int = 20_000  # for the receiver; more are dropped, and counted
    export_timeout_s: float = 10.0  # of one message to the receiver, with all its retries
    flush_s: float = 5.0  # after the last call, within what is left of server.drain_s

    def __post_init__(self) -> None:
        url = urlsplit(self.otlp_endpoint)
        if self.otlp_endpoint and not (url.scheme in ("http", "https") and url.netloc):
            raise ConfigError(
                f"otlp_endpoint {self.otlp_endpoint!r} is not http://HOST:PORT or https://HOST:PORT"
            )
        if not 0 <= self.sample_ratio <= 1:
            raise ConfigError(f"sample_ratio {self.sample_ratio} is not in 0 .. 1")
        for name, most in (("max_steps", MOST_STEPS), ("max_queued_spans", MOST_SPANS)):
            count: int = getattr(self, name)
            if not 1 <= count <= most:
                raise ConfigError(f"{name} {count} is not in 1 .. {most}")
        if not 0 < self.export_timeout_s <= 600:
            raise ConfigError(f"export_timeout_s {self.export_timeout_s} is not in 0 .. 600")
        if not 0 <= self.flush_s <= 600:
            raise ConfigError(f"flush_s {self.flush_s} is not in 0 .. 600")

    @property
    def enabled(self) -> bool:
        return bool(self.otlp_endpoint)
