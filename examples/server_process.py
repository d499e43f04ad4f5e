"""A stemserve server as a child process, on free ports, for as long as a `with` block lasts."""

import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

STOP_TIMEOUT_S = 30.0


@contextmanager
def running_server(model: str, console: Console) -> Generator[str]:
    """Yields HOST:PORT of the RPC port. Raises RuntimeError if the server does not come up."""
    command = [str(Path(sys.executable).with_name("stemserve")), "serve", "--model", model]
    command += ["--port", "0", "--health-port", "0", "--metrics-port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with console.status("starting the server and loading the model"):
            line = server.stdout.readline() if server.stdout is not None else ""
        if "gRPC " not in line:
            raise RuntimeError(f"the server did not start (exit code {server.wait()})")
        yield line.partition("gRPC ")[2].partition(",")[0]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(STOP_TIMEOUT_S)
