"""Collections of garbage in a worker that serves: short ones, and known for how long.

A full one looks at every object of torch, Triton and the captured graphs, some hundred thousand;
no thread runs meanwhile, so a step would wait some tenths of a second for it.
"""

import gc
import time
from collections.abc import Mapping


def leave_out_what_lives() -> None:
    """What is there now lives for ever: no collection need look at it again."""
    gc.collect()
    gc.freeze()


class GarbageClock:
    """Seconds that the process has spent on collections since `watch`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0  # time.perf_counter

    def watch(self) -> None:
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: Mapping[str, int]) -> None:
        # Nothing is logged here: the thread may be in the middle of writing to the log.
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began
