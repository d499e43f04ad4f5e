"""When the device began and ended each step, by its own clock."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpan:
    """Of one step; its numbers are there once the device has passed the end."""

    before: torch.cuda.Event | None  # end of the step before
    began: torch.cuda.Event
    ended: torch.cuda.Event

    def wait(self) -> None:
        self.ended.synchronize()

    @property
    def seconds(self) -> float:
        """Gaps between the step's kernels included."""
        return float(self.began.elapsed_time(self.ended)) / 1e3

    @property
    def idle_seconds(self) -> float:
        """Since the step before, if there was one."""
        return 0.0 if self.before is None else float(self.before.elapsed_time(self.began)) / 1e3


class DeviceClock:
    """Begin before a step's first work is launched, end after its last: in turn, on one stream."""

    def __init__(self) -> None:
        self._before: torch.cuda.Event | None = None

    def begin(self) -> torch.cuda.Event:
        return _event()

    def end(self, began: torch.cuda.Event) -> DeviceSpan:
        span = DeviceSpan(before=self._before, began=began, ended=_event())
        self._before = span.ended
        return span


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
