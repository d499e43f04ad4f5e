"""The command that says how many GPUs so many calls need."""

import subprocess
import sys
from typing import Annotated

import typer

from stemserve.service.commands.failure import fail
from stemserve.service.config.server import default_model_cache
from stemserve.service.default_model import DEFAULT_MODEL, ModelNotFound, resolve

COMMAND = (sys.executable, "-m", "stemserve.worker", "capacity")


def _all_help(context: typer.Context, wanted: bool) -> None:
    """This command's help, and that of the process which knows the other options."""
    if wanted:
        print(context.get_help(), end="\n\n", flush=True)
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
            "--help", is_eager=True, callback=_all_help, help="Show this message and exit."
        ),
    ] = False,
) -> None:
    """Predict how many GPUs a load needs, from the cost tables; no GPU is needed.

    Options of the load and of the device are listed below. docs/capacity.md says how far
    predictions were from what was measured.

    \b
    Examples:
      stemserve capacity --model ./Qwen3-0.6B --prefix-tokens 2048 --items 100 --item-tokens 64 \\
          --hit-rate 0.5 --items-per-second 50000 --latency-ms 200
      stemserve capacity --model ./Qwen3-0.6B --prefix-tokens 1024 --samples 16 --new-tokens 256 \\
          --tokens-per-second 100000
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
