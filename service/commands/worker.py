"""`stemserve worker`: a worker process for a server elsewhere."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from stemserve.service.commands.failure import fail
from stemserve.service.config.error import ConfigError
from stemserve.service.config.sources import read_settings
from stemserve.service.default_model import ModelNotFound, resolve
from stemserve.service.workers.worker_process import ALLOCATION

COMMAND = (sys.executable, "-m", "stemserve.worker.alone")


def worker(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings in TOML, as for serve; options beat them."),
    ] = None,
) -> None:
    """Run a worker alone, for a server elsewhere: stemserve serve --worker HOST:PORT.

    --config FILE takes model, log and the worker's settings from a file as serve does; all other
    options go to the worker process, and stemserve worker --help lists them.

    \b
    Example:
      stemserve worker --listen 127.0.0.1:50061 --model ./Qwen3-0.6B
    """
    options = [] if config is None else _options(config)
    os.execve(COMMAND[0], [*COMMAND, *options, *context.args], ALLOCATION | os.environ)


def _options(file: Path) -> list[str]:
    """What the worker process is told by the settings of a server."""
    try:
        config = read_settings(file=file, environment=os.environ, flags={}).config
        model = resolve(config.model, cache_dir=config.model_cache, progress=_say)
    except (ConfigError, ModelNotFound) as error:
        fail(str(error))
    options = config.worker.options(
        model,
        max_step_tokens=config.limits.max_step_tokens,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    return [*options, "--step-timeout", str(config.worker.step_timeout_s)]


def _say(line: str) -> None:
    print(f"stemserve: {line}", file=sys.stderr, flush=True)
