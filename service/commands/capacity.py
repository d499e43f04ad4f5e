"""The command that says how many GPUs so many calls need."""

import subprocess
import sys
from typing import Annotated

import typer

from stemserve.service.commands.failure import fail
from stemserve.service.config.server import default_model_cache
from stemserve.service.default_model import DEFAULT_MODEL, ModelNotFound, resolve

COMMAND = (sys.executable, "-m", "stemserve.worker", "capacity")


def _help_of_the_process(wanted: bool) -> None:
    """It knows all options."""
    if wanted:
        raise typer.Exit(subprocess.run([*COMMAND, "--help"], check=False).returncode)


def capacity(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help=f"{DEFAULT_MODEL}, a .gguf file, a Hugging Face folder or a config.json. "
            "Only its shape matters."
        ),
    ],
    _help: Annotated[
        bool,
        typer.Option(
            "--help", "-h", is_eager=True, callback=_help_of_the_process, help="All options."
        ),
    ] = False,
) -> None:
    """Predict how many GPUs a load needs, from the cost tables; no GPU is needed.

    The model is found here; all options go to the process that predicts.
    """
    try:
        path = resolve(model, cache_dir=default_model_cache(), progress=_say)
    except ModelNotFound as error:
        fail(str(error))
    code = subprocess.run([*COMMAND, "--model", str(path), *context.args], check=False).returncode
    if code:
        raise typer.Exit(code)


def _say(line: str) -> None:
    print(f"stemserve: {line}", file=sys.stderr, flush=True)
