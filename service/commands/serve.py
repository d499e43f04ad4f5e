"""`stemserve serve`: settings from flags, file and environment, then the server."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stemserve.json_log import FORMATS as LOG_FORMATS
from stemserve.json_log import log_to_stderr
from stemserve.service.call_facts import log_context
from stemserve.service.calls.services import model_tokenizer
from stemserve.service.commands.failure import fail
from stemserve.service.commands.ready_line import announce
from stemserve.service.config.error import ConfigError
from stemserve.service.config.server import (
    DEVICES,
    DTYPES,
    KERNELS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    LOG_LEVELS,
    ServiceConfig,
    parse_bytes,
)
from stemserve.service.config.sources import Setting, read_settings, settings_text
from stemserve.service.default_model import DEFAULT_MODEL, ModelNotFound, resolve
from stemserve.service.main import run
from stemserve.service.serving.server import PortInUse
from stemserve.service.workers.worker_client import WorkerUnreachable

_DEFAULTS = ServiceConfig()

KEYS: Mapping[str, str] = {  # of the configuration, by the parameter of `serve`
    "model": "model",
    "model_cache": "model_cache",
    "log_level": "log_level",
    "log_format": "log_format",
    "log_calls": "log_calls",
    "otlp_endpoint": "tracing.otlp_endpoint",
    "trace_sample_ratio": "tracing.sample_ratio",
    "host": "server.host",
    "port": "server.port",
    "health_port": "server.health_port",
    "metrics_port": "server.metrics_port",
    "admin_port": "server.admin_port",
    "drain_seconds": "server.drain_s",
    "drain_delay_seconds": "server.drain_delay_s",
    "worker": "worker.address",
    "load_format": "worker.load_format",
    "dtype": "worker.dtype",
    "device": "worker.device",
    "kv_pages": "worker.kv_pages",
    "kv_memory": "worker.kv_memory",
    "gpu_memory_utilization": "worker.gpu_memory_utilization",
    "kv_cache_dtype": "worker.kv_cache_dtype",
    "page_size": "worker.page_size",
    "threads": "worker.threads",
    "max_burst_steps": "worker.max_burst_steps",
    "kernel": "worker.kernel",
    "deterministic": "worker.deterministic",
    "cuda_graphs": "worker.cuda_graphs",
    "kernel_probe_rate": "worker.kernel_probe_rate",
    "cost_table": "worker.cost_table",
    "draft_tokens": "speculation.draft_tokens",
    "max_step_tokens": "limits.max_step_tokens",
    "max_queued_requests": "limits.max_queued_requests",
    "max_queued_tokens": "limits.max_queued_tokens",
}


def _choices(names: Sequence[str], text: str = "") -> str:
    return f"{text}One of {', '.join(names)}."


def _parse_bytes(text: str) -> int:
    try:
        return int(parse_bytes(text))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def _server(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Server", **more)


def _worker(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Worker process", **more)


def _limit(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel="Limits")


def serve(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="STEMSERVE_CONFIG",
            help="Settings in TOML. STEMSERVE__SERVER__PORT=... in the environment beats the file, "
            "a flag beats both.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings and who gave them, and end.")
    ] = False,
    model: Annotated[
        str,
        typer.Option(help=f"{DEFAULT_MODEL}, a .gguf file, or a Hugging Face folder."),
    ] = DEFAULT_MODEL,
    model_cache: Annotated[
        Path | None,
        typer.Option(help="Folder of the default model.", show_default="~/.cache/stemserve"),
    ] = None,
    host: Annotated[str, _server("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, _server("gRPC: all services, health and reflection.")] = 50051,
    health_port: Annotated[int, _server("gRPC health only, plaintext, for probes.")] = 50052,
    metrics_port: Annotated[int, _server("Prometheus metrics, over HTTP.")] = 9400,
    admin_port: Annotated[
        int | None,
        _server("gRPC of the Admin service, plaintext, on 127.0.0.1 only.", show_default="off"),
    ] = None,
    drain_seconds: Annotated[
        float, _server("After SIGTERM, how long running calls may take to finish.")
    ] = _DEFAULTS.server.drain_s,
    drain_delay_seconds: Annotated[
        float,
        _server(
            "After SIGTERM, how long new calls are still taken, while health says NOT_SERVING."
        ),
    ] = _DEFAULTS.server.drain_delay_s,
    log_level: Annotated[str, _server(_choices(LOG_LEVELS))] = "info",
    log_format: Annotated[
        str, _server(_choices(LOG_FORMATS, "json: one object a line, with ids of call and trace. "))
    ] = "text",
    log_calls: Annotated[bool, _server("Log a line for each call that has ended.")] = False,
    otlp_endpoint: Annotated[
        str,
        _server(
            "Send traces of calls to this OTLP receiver, over gRPC. Needs stemserve[tracing].",
            metavar="http://HOST:4317",
            show_default="off",
        ),
    ] = "",
    trace_sample_ratio: Annotated[
        float, _server("Share of calls that are traced, where the caller does not say.")
    ] = _DEFAULTS.tracing.sample_ratio,
    worker: Annotated[
        str | None,
        _worker("Use a worker that runs already, and start none.", metavar="HOST:PORT|unix:/PATH"),
    ] = None,
    load_format: Annotated[
        str, _worker(_choices(LOAD_FORMATS, "dummy: random weights for a config.json. "))
    ] = "auto",
    dtype: Annotated[str, _worker(_choices(DTYPES))] = "auto",
    device: Annotated[str, _worker(_choices(DEVICES))] = "auto",
    kv_pages: Annotated[int | None, _worker("Pages of the KV cache; see --kv-memory.")] = None,
    kv_memory: Annotated[
        int | None,
        _worker(
            "Size of the KV cache, instead of --kv-pages. Without both: on a CPU a quarter of the "
            "free memory and at most 4G, on a GPU what weights and steps leave.",
            parser=_parse_bytes,
            metavar="512M|2G",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        _worker(
            "Part of a GPU's memory for weights, steps and KV cache together.", show_default="0.9"
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        _worker(
            _choices(KV_CACHE_DTYPES, "Numbers of the KV cache; auto: the model's. "),
            show_default="auto",
        ),
    ] = None,
    page_size: Annotated[
        int | None, _worker("Tokens of a KV page; 8, 16, 32 or 64 on a GPU.", show_default="16")
    ] = None,
    threads: Annotated[int | None, _worker("CPU threads of the model; else torch decides.")] = None,
    max_burst_steps: Annotated[
        int | None,
        _worker("Decode steps sent at once while nobody waits.", show_default="8 on a GPU, else 1"),
    ] = None,
    kernel: Annotated[
        str | None, _worker(_choices(KERNELS, "Force an attention strategy, for debugging. "))
    ] = None,
    deterministic: Annotated[
        bool,
        _worker(
            "Results that do not depend, bit for bit, on what runs beside them or on the cache. "
            "Slower; see docs/operations.md."
        ),
    ] = False,
    cuda_graphs: Annotated[
        bool, _worker("Small steps on a GPU as captured graphs; without them launch by launch.")
    ] = True,
    kernel_probe_rate: Annotated[
        float,
        _worker(
            "Share of steps after which an idle worker (CPU) times the next best attention too."
        ),
    ] = _DEFAULTS.worker.kernel_probe_rate,
    cost_table: Annotated[
        Path | None, _worker("Costs of attention that stemserve calibrate measured.")
    ] = None,
    draft_tokens: Annotated[
        int,
        _server(
            "Tokens that Generate guesses ahead from what repeats, and verifies, where a call "
            "does not say; 8 is a good number, 0: none."
        ),
    ] = 0,
    max_step_tokens: Annotated[
        int,
        _limit("Rows of one step; longer prompts take several. 0: 512 on a CPU, 9216 on a GPU."),
    ] = _DEFAULTS.limits.max_step_tokens,
    max_queued_requests: Annotated[
        int, _limit("Requests that wait; more are refused with RESOURCE_EXHAUSTED.")
    ] = _DEFAULTS.limits.max_queued_requests,
    max_queued_tokens: Annotated[
        int, _limit("Tokens that wait to be computed; more are refused.")
    ] = _DEFAULTS.limits.max_queued_tokens,
) -> None:
    """Start the server: a gRPC front end, and a worker process that runs the model.

    It prints one line when it is ready. SIGTERM or Ctrl-C lets the running calls finish; a second
    one ends it at once.

    \b
    Examples:
      stemserve serve
      stemserve serve --model ./Qwen3-0.6B --host 0.0.0.0 --kv-memory 2G
      stemserve serve --config stemserve.toml --print-config
    """
    try:
        settings = read_settings(file=config, environment=os.environ, flags=_flags(context))
    except ConfigError as error:
        fail(str(error))
    if print_config:
        print(settings_text(settings), end="")
        return
    _serve(settings.config)


def _flags(context: typer.Context) -> dict[str, Setting]:
    """The settings that the command line gives."""
    return {
        key: Setting(value=context.params[name], source=f"--{name.replace('_', '-')}")
        for name, key in KEYS.items()
        if _source(context, name) == "COMMANDLINE"
    }


def _source(context: typer.Context, name: str) -> str:
    """The name only: typer brings its own click, whose types are not click's."""
    source: Any = context.get_parameter_source(name)
    return source.name if source is not None else ""


def _serve(config: ServiceConfig) -> None:
    log_to_stderr(
        level=config.log_level, form=config.log_format, process="service", context=log_context
    )
    try:
        model = resolve(config.model, cache_dir=config.model_cache, progress=_progress)
        tokenizer = model_tokenizer(model, dummy=config.worker.load_format == "dummy")
    except ModelNotFound as error:
        fail(str(error))
    except (OSError, ValueError) as error:
        fail(f"model {config.model!r} has no usable tokenizer: {error}")
    try:
        run(config, model, tokenizer, announce=announce)
    except (ConfigError, PortInUse, WorkerUnreachable) as error:
        fail(str(error))


def _progress(line: str) -> None:
    print(f"stemserve: {line}", file=sys.stderr, flush=True)
