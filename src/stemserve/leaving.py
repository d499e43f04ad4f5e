"""Let a signal end a process that still imports: by its exit status, without a traceback.

It imports next to nothing, since it has to be there before all else.
"""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT  # as a shell counts Ctrl-C
_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextmanager
def leaves_quietly() -> Generator[None]:
    """SIGINT and SIGTERM end the process at once, with 128 and their number as its exit status.

    Signals that the caller ignores, as `nohup` does, stay ignored. For the main thread.
    """
    mine = [number for number, usual in _DEFAULTS.items() if signal.getsignal(number) == usual]
    before = {number: signal.signal(number, _leave) for number in mine}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """An exception could leave an import as one of another kind, or not at all."""
    os._exit(128 + number)
