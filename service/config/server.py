"""Everything that a server can be told, checked whole before anything starts."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict

from stemserve.json_log import FORMATS as LOG_FORMATS
from stemserve.service.config.access import (
    STRICT,
    AuthConfig,
    TenantConfig,
    TlsConfig,
    check_access,
)
from stemserve.service.config.error import ConfigError
from stemserve.service.config.tracing import TracingConfig
from stemserve.service.default_model import DEFAULT_MODEL
from stemserve.service.limits import MOST_DRAFT_TOKENS, Limits
from stemserve.service.target import check_target

LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = (
    "naive",
    "split",
    "ragged",
    "cascade",
    "multi_item",
    "custom_mask",
    "paged",
    "codec",
)
LOG_LEVELS = ("debug", "info", "warning", "error")
LONGEST_S = 1_000_000  # some 11 days; gRPC counts milliseconds in 32 bits
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def default_model_cache() -> Path:
    """Where the default model is kept: $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "stemserve"  # still with its ~ for a user without a home folder


def parse_bytes(size: Any) -> Any:
    """512M or 2G as a number of bytes; numbers stay. Raises ConfigError."""
    if not isinstance(size, str):
        return size
    number, unit = size.strip().upper().removesuffix("IB").removesuffix("B"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{size!r} is not a size such as 512M or 2G") from error


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    host: str = "127.0.0.1"
    port: int = 50051
    health_port: int = 50052  # plaintext, health only
    metrics_port: int = 9400
    admin_port: int | None = None  # of 127.0.0.1, plaintext; None: no Admin service
    drain_s: float = 20.0
    drain_delay_s: float = 0.0  # a load balancer's time to notice that health says NOT_SERVING
    default_deadline_s: float = 0.0  # of calls that come without one; 0: none
    # A connection of this age is closed once its calls are done, and made anew: balancers of
    # connections can then spread. 0: never.
    max_connection_age_s: float = 3_600.0
    max_connection_age_grace_s: float = (
        0.0  # then its calls are cut; 0: they may take what they take
    )
    keepalive_s: float = 60.0  # a client that is silent for so long is asked whether it is there
    keepalive_timeout_s: float = 20.0  # and has gone if it does not answer
    least_ping_interval_s: float = 10.0  # of clients; each ping before is a strike
    max_ping_strikes: int = 2  # more end the connection; 0: none is counted
    # Under load a stream's tokens wait so long for others to share their message; 0: never.
    max_stream_delay_ms: float = 20.0

    def __post_init__(self) -> None:
        ports = {"port": self.port, "health_port": self.health_port}
        ports["metrics_port"] = self.metrics_port
        if self.admin_port is not None:
            ports["admin_port"] = self.admin_port
        for name, port in ports.items():
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name} {port} is not in 0 .. 65535 (0: any free port)")
        named = [port for port in ports.values() if port]
        if len(set(named)) < len(named):
            raise ConfigError(f"the ports must differ: {ports}")
        for item in fields(self):
            if item.name.endswith("_s"):
                self._check_seconds(item.name)
        if not 0 <= self.max_stream_delay_ms <= 1_000:
            raise ConfigError(f"max_stream_delay_ms {self.max_stream_delay_ms} is not in 0 .. 1000")
        if self.max_ping_strikes < 0:
            raise ConfigError(f"max_ping_strikes {self.max_ping_strikes} must be 0 or more")

    def _check_seconds(self, name: str) -> None:
        seconds: float = getattr(self, name)
        if not 0 <= seconds <= LONGEST_S:
            raise ConfigError(f"{name} {seconds} is not a number of seconds from 0 to {LONGEST_S}")
        if name.startswith("keepalive_") and not seconds:
            raise ConfigError(f"{name} must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Options of the worker process. None: the worker's own default."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    address: str | None = None  # of a worker that somebody else runs; else one is started
    tls_ca: Path | None = None  # PEM: speak TLS with a worker whose certificate this signed
    tls_certificate: Path | None = None  # PEM, of this server, for a worker that asks for one
    tls_private_key: Path | None = None
    load_format: str = "auto"
    dtype: str | None = None
    device: str | None = None
    kv_pages: int | None = None
    kv_memory: Bytes | None = None
    gpu_memory_utilization: float | None = None  # for weights, steps and KV cache together
    kv_cache_dtype: str | None = None
    page_size: int | None = None
    threads: int | None = None
    max_burst_steps: int | None = None  # decode steps that are sent at once
    max_burst_ms: float = 20.0  # that they may take: so long whoever comes meanwhile may wait
    kernel: str | None = None  # forces one attention strategy, for debugging
    deterministic: bool = False  # results do not depend on what runs beside them, or on the cache
    cuda_graphs: bool = True  # without them every kernel is launched by itself
    kernel_probe_rate: float = 0.0  # of the steps; then an idle worker times the next best too
    cost_table: Path | None = None  # what `stemserve calibrate` wrote
    start_timeout_s: float = 600.0  # until it has loaded the model; else that start has failed
    # A worker that takes ten times as long as expected for a step is replaced, within these bounds.
    step_timeout_least_s: float = 10.0
    step_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("device", self.device, DEVICES)
        _check_choice("kernel", self.kernel, KERNELS)
        counts = {
            "kv_pages": self.kv_pages,
            "kv_memory": self.kv_memory,
            "page_size": self.page_size,
            "threads": self.threads,
            "max_burst_steps": self.max_burst_steps,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value} must be at least 1")
        if not 0 <= self.kernel_probe_rate <= 1:
            raise ConfigError(f"kernel_probe_rate {self.kernel_probe_rate} is not in 0 .. 1")
        if self.max_burst_ms < 0:
            raise ConfigError(f"max_burst_ms {self.max_burst_ms} must not be negative")
        if self.deterministic and self.kernel is not None:
            raise ConfigError("deterministic has its own attention; give it without kernel")
        if self.deterministic and self.kv_cache_dtype not in (None, "auto"):
            raise ConfigError("deterministic needs kv_cache_dtype auto")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization {self.gpu_memory_utilization} is not more than 0 and at "
                "most 1"
            )
        if self.kv_pages is not None and self.kv_memory is not None:
            raise ConfigError("give kv_pages or kv_memory, not both")
        if self.address is not None:
            self._check_address(self.address)
        self._check_tls()
        self._check_times()

    def _check_address(self, address: str) -> None:
        try:
            check_target(address)
        except ValueError as error:
            raise ConfigError(f"address {error}") from error

    def _check_times(self) -> None:
        if not 0 < self.start_timeout_s <= LONGEST_S:
            raise ConfigError(
                f"start_timeout_s {self.start_timeout_s} is not more than 0 and at most {LONGEST_S}"
            )
        if not 0 < self.step_timeout_least_s <= self.step_timeout_s:
            raise ConfigError(
                f"step_timeout_least_s {self.step_timeout_least_s} must be more than 0 and at most "
                f"step_timeout_s, {self.step_timeout_s}"
            )

    def _check_tls(self) -> None:
        if (self.tls_certificate is None) != (self.tls_private_key is None):
            raise ConfigError("tls_certificate and tls_private_key go together; give both")
        if self.tls_certificate is not None and self.tls_ca is None:
            raise ConfigError("tls_certificate needs tls_ca, which signed the worker's")
        if self.tls_ca is not None and (self.address or "unix:").startswith("unix:"):
            raise ConfigError("tls_ca needs address HOST:PORT; other workers are on this machine")
        for name in ("tls_ca", "tls_certificate", "tls_private_key"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ConfigError(f"{name} {path} is not a file")

    def command(
        self, model: Path, *, max_step_tokens: int, log_level: str, log_format: str = "text"
    ) -> list[str]:
        """The worker process without its address."""
        options = self.options(
            model, max_step_tokens=max_step_tokens, log_level=log_level, log_format=log_format
        )
        return [sys.executable, "-m", "stemserve.worker", *options]

    def options(
        self, model: Path, *, max_step_tokens: int, log_level: str, log_format: str
    ) -> list[str]:
        """What the worker process is told."""
        options = {
            "--model": model,
            "--load-format": self.load_format,
            "--dtype": self.dtype,
            "--device": self.device,
            "--kv-pages": self.kv_pages,
            "--kv-memory-bytes": self.kv_memory,
            "--gpu-memory-utilization": self.gpu_memory_utilization,
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--page-size": self.page_size,
            "--max-step-tokens": max_step_tokens or None,
            "--threads": self.threads,
            "--max-burst-steps": self.max_burst_steps,
            "--kernel": self.kernel,
            "--cost-table": self.cost_table,
            "--kernel-probe-rate": self.kernel_probe_rate or None,
            "--log-level": log_level,
            "--log-format": None if log_format == LOG_FORMATS[0] else log_format,
        }
        words: list[str] = []
        for option, value in options.items():
            if value is not None:
                words += [option, str(value)]
        words += ["--deterministic"] * self.deterministic
        return words + ["--no-cuda-graphs"] * (not self.cuda_graphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    draft_tokens: int = 0  # of Generate calls that do not say; 0: none
    least_gain: float = 1.2  # in tokens a second, expected of drafts before they are verified

    def __post_init__(self) -> None:
        if not 0 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ConfigError(
                f"draft_tokens {self.draft_tokens} is not in 0 .. {MOST_DRAFT_TOKENS}"
            )
        if not 0 <= self.least_gain <= MOST_DRAFT_TOKENS:
            raise ConfigError(f"least_gain {self.least_gain} is not in 0 .. {MOST_DRAFT_TOKENS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: str = DEFAULT_MODEL
    model_cache: Path = field(default_factory=default_model_cache)
    server: ServerConfig = field(default_factory=ServerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    limits: Limits = field(default_factory=Limits)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict[str, TenantConfig])
    tracing: TracingConfig = field(default_factory=TracingConfig)
    log_level: str = "info"
    log_format: str = "text"
    log_calls: bool = False  # a line for each call that has ended

    def __post_init__(self) -> None:
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        check_access(self.auth, self.tls, self.tenants)


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(f"{name} {value!r} is not one of {', '.join(choices)}")
