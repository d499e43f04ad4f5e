"""A runner that tells of steps whose launch kept a GPU waiting, and of what they waited for."""

import logging
import time

import torch

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.garbage import GarbageClock
from stemserve.worker.memory.budget import MIB, held_bytes
from stemserve.worker.steps.smaller_steps import Launched, Runner
from stemserve.worker.steps.step import Step

log = logging.getLogger(__name__)

# A launch takes some milliseconds: a tenth of a second is the first use of something, or a mishap.
SLOW_S = 0.1


class WatchedRunner:
    def __init__(
        self,
        runner: Runner,
        device: torch.device,
        garbage: GarbageClock,
        *,
        slow_s: float = SLOW_S,
    ) -> None:
        self._runner = runner
        self._device = device
        self._garbage = garbage
        self._slow_s = slow_s
        self._held = held_bytes(device)  # when it was last told

    @property
    def uses_gpu(self) -> bool:
        return self._runner.uses_gpu

    @property
    def num_classes(self) -> int:
        return self._runner.num_classes

    def decode(self, plan: worker_pb2.StepPlan) -> Step:
        """Raises BadPlan."""
        return self._runner.decode(plan)

    def launch(self, plan: worker_pb2.StepPlan) -> Launched:
        """Raises as the runner's."""
        began, garbage = time.perf_counter(), self._garbage.seconds
        launched = self._runner.launch(plan)
        seconds = time.perf_counter() - began
        if seconds >= self._slow_s:
            self._tell(plan.step_id, seconds, self._garbage.seconds - garbage)
        return launched

    def _tell(self, step_id: int, seconds: float, garbage: float) -> None:
        before, self._held = self._held, held_bytes(self._device)
        log.info(
            "step %d: its launch took %.0f ms, of which collections of garbage %.0f ms; torch has "
            "%.0f MiB of the GPU, %+.0f MiB since this was last looked at",
            step_id,
            seconds * 1e3,
            garbage * 1e3,
            self._held / MIB,
            (self._held - before) / MIB,
        )
