"""The command that measures what attention costs on this machine."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from stemserve.service.commands.failure import fail
from stemserve.service.config.server import DEVICES, DTYPES, default_model_cache
from stemserve.service.default_model import DEFAULT_MODEL, ModelNotFound, resolve


def calibrate(
    model: Annotated[
        str,
        typer.Option(
            help=f"{DEFAULT_MODEL}, a .gguf file, a Hugging Face folder or a config.json. "
            "Only the number and size of its attention heads matter."
        ),
    ] = DEFAULT_MODEL,
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("costs.json"),
    dtype: Annotated[str, typer.Option(help=f"As for serve. One of {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[
        str, typer.Option(help=f"As for serve. One of {', '.join(DEVICES)}.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of the model, as for serve.", min=1)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure less: rougher, some seconds.")
    ] = False,
) -> None:
    """Measure what every attention strategy costs on this machine, for serve --cost-table.

    The server picks the strategy of each step by such a table. Tables for a CPU in float32 and for
    the NVIDIA H200 come with it; on any other device it measures one at every start, which this
    command saves. It takes one to two minutes; nothing else should run meanwhile.

    \b
    Examples:
      stemserve calibrate --output costs.json
      stemserve calibrate --model ./Qwen3-0.6B --device cuda --output qwen3.json
      stemserve serve --model ./Qwen3-0.6B --cost-table qwen3.json
    """
    for name, value, known in (("dtype", dtype, DTYPES), ("device", device, DEVICES)):
        if value not in known:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=name)
    try:
        path = resolve(model, cache_dir=default_model_cache(), progress=_say)
    except ModelNotFound as error:
        fail(str(error))
    command = [sys.executable, "-m", "stemserve.worker", "calibrate", "--model", str(path)]
    command += ["--output", str(output), "--dtype", dtype, "--device", device]
    if threads is not None:
        command += ["--threads", str(threads)]
    if quick:
        command.append("--quick")
    code = subprocess.run(command, check=False).returncode
    if code:
        raise typer.Exit(code)
    print(f"wrote {output}; use it: stemserve serve --model {model} --cost-table {output}")


def _say(line: str) -> None:
    print(f"stemserve: {line}", file=sys.stderr, flush=True)
