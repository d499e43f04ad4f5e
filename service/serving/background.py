"""Work beside the calls, until the server ends."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack

_log = logging.getLogger(__name__)


def run_until_closed(stack: AsyncExitStack, work: Coroutine[None, None, None]) -> None:
    """Cancelled with the stack. That a fault has ended it is logged at once."""
    task = asyncio.create_task(work)
    task.add_done_callback(_note_end)
    stack.callback(task.cancel)


def _note_end(task: "asyncio.Task[None]") -> None:
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        _log.critical("a fault ended %s; restart the server", task.get_coro(), exc_info=error)
