"""Everything that a server can be told, checked whole before anything starts."""

import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from stemserve.service.default_model import DEFAULT_MODEL
from stemserve.service.limits import Limits

LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
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


class ConfigError(ValueError):
    """A setting that cannot work. The message names it."""


def default_model_cache() -> Path:
    """Where the default model is kept: $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "stemserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 50051
    health_port: int = 50052  # plaintext, health only
    metrics_port: int = 9400
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        ports = {"port": self.port, "health_port": self.health_port}
        ports["metrics_port"] = self.metrics_port
        for name, port in ports.items():
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name} {port} is not in 0 .. 65535 (0: any free port)")
        named = [port for port in ports.values() if port]
        if len(set(named)) < len(named):
            raise ConfigError(f"the ports must differ: {ports}")
        if not (math.isfinite(self.drain_s) and self.drain_s >= 0):
            raise ConfigError(f"drain_s {self.drain_s} must be a number of seconds, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Options of the worker process. None: the worker's own default."""

    address: str | None = None  # of a worker that somebody else runs; else one is started
    load_format: str = "auto"
    dtype: str | None = None
    device: str | None = None
    kv_pages: int | None = None
    kv_memory_bytes: int | None = None
    page_size: int | None = None
    threads: int | None = None
    kernel: str | None = None  # forces one attention strategy, for debugging
    step_timeout_s: float = 300.0  # a worker that is silent for this long is replaced

    def __post_init__(self) -> None:
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("device", self.device, DEVICES)
        _check_choice("kernel", self.kernel, KERNELS)
        counts = {
            "kv_pages": self.kv_pages,
            "kv_memory": self.kv_memory_bytes,
            "page_size": self.page_size,
            "threads": self.threads,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value} must be at least 1")
        if self.kv_pages is not None and self.kv_memory_bytes is not None:
            raise ConfigError("give kv_pages or kv_memory, not both")
        if not self.step_timeout_s > 0:
            raise ConfigError(f"step_timeout_s {self.step_timeout_s} must be more than 0")

    def command(self, model: Path, *, max_step_tokens: int, log_level: str) -> list[str]:
        """The worker process without its address."""
        options = {
            "--model": model,
            "--load-format": self.load_format,
            "--dtype": self.dtype,
            "--device": self.device,
            "--kv-pages": self.kv_pages,
            "--kv-memory-bytes": self.kv_memory_bytes,
            "--page-size": self.page_size,
            "--max-step-tokens": max_step_tokens,
            "--threads": self.threads,
            "--kernel": self.kernel,
            "--log-level": log_level,
        }
        words = [sys.executable, "-m", "stemserve.worker"]
        for option, value in options.items():
            if value is not None:
                words += [option, str(value)]
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    model: str = DEFAULT_MODEL
    model_cache: Path = field(default_factory=default_model_cache)
    server: ServerConfig = field(default_factory=ServerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    limits: Limits = field(default_factory=Limits)
    log_level: str = "info"

    def __post_init__(self) -> None:
        _check_choice("log_level", self.log_level, LOG_LEVELS)


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(f"{name} {value!r} is not one of {', '.join(choices)}")
