"""`stemserve worker`: a worker process for a server elsewhere."""

import os
import sys

import typer


def worker(context: typer.Context) -> None:
    """Run a worker alone, for a server elsewhere: stemserve serve --worker HOST:PORT.

    All options go to the worker process; stemserve worker --help lists them.

    \b
    Example:
      stemserve worker --listen 127.0.0.1:50061 --model ./Qwen3-0.6B
    """
    command = [sys.executable, "-m", "stemserve.worker", *context.args]
    os.execv(sys.executable, command)
