"""The one line of standard output by which a server says that it can be called, and where."""

from stemserve.service.commands.failure import fail
from stemserve.service.main import Ready


def announce(ready: Ready) -> None:
    try:
        print(_ready_line(ready), flush=True)
    except OSError as error:
        fail(f"cannot write to standard output that the server is ready: {error.strerror}")


def _ready_line(ready: Ready) -> str:
    facts, ports = ready.facts, ready.ports
    kind = f"{facts.dtype}, deterministic" if facts.deterministic else facts.dtype
    return (
        f"stemserve is ready: {facts.model} ({kind}) on {facts.device}, "
        f"gRPC {ports.host}:{ports.port}, health {ports.health_port}, "
        f"metrics {ready.metrics_port}"
        + ("" if ready.admin_port is None else f", admin {ready.admin_port}")
    )
