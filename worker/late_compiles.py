"""Notice kernels that Triton compiles once calls are served: a call waits for each."""

import logging
import time
from importlib import import_module
from typing import Any

log = logging.getLogger(__name__)


class LateCompiles:
    """Triton's hooks; what is compiled from then on, or read from its cache, is logged."""

    def __init__(self) -> None:
        self._began = 0.0  # the compilation that runs, time.perf_counter

    def watch(self) -> None:
        runtime: Any = import_module("triton.knobs").runtime
        runtime.jit_cache_hook = self.begin
        runtime.jit_post_compile_hook = self.end

    def begin(self, **_: Any) -> None:
        self._began = time.perf_counter()

    def end(self, **compiled: Any) -> None:
        """`repr`: the kernel's name and the types of its arguments."""
        taken_ms = (time.perf_counter() - self._began) * 1e3
        log.info("a step waited %.0f ms for Triton's %s", taken_ms, compiled["repr"])
