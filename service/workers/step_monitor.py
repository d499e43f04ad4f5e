"""Ask the step loop for its load once a second: for the gauges, and to notice if it hangs."""

import asyncio
import logging
from collections.abc import Callable

from stemserve.service.errors import NotReady
from stemserve.service.request import Load
from stemserve.service.serving.health import Health
from stemserve.service.workers.threaded_engine import ThreadedEngine

PERIOD_S = 1.0
PATIENCE_S = (
    4.0  # a step loop that is this late is taken for dead; one turn of it takes milliseconds
)

_log = logging.getLogger(__name__)


async def watch_step_loop(
    engine: ThreadedEngine,
    health: Health,
    record: Callable[[Load], None],
    *,
    period_s: float = PERIOD_S,
    patience_s: float = PATIENCE_S,
) -> None:
    """Runs until cancelled."""
    alive = True
    while True:
        await asyncio.sleep(period_s)
        answered = True
        try:
            async with asyncio.timeout(patience_s):
                load = await engine.load()
            record(load)
        except NotReady:
            pass  # it answers; there is no worker
        except TimeoutError:
            answered = False
        except Exception:  # it answers that it cannot say
            _log.exception("the load is not known")
        if answered != alive:
            alive = answered
            health.set_alive(alive)
            _log.error("the step loop %s", "answers again" if alive else "does not answer")
