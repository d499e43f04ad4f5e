"""A step's time on the device, and the device's time between steps."""

import time

import pytest
import torch

from stemserve.worker.device_clock import DeviceClock, DeviceSpan

pytestmark = pytest.mark.gpu


def test_spans_and_the_time_between_them_add_up_to_no_more_than_the_wall_clock() -> None:
    matrix = torch.ones(2048, 2048, device="cuda")
    (matrix @ matrix).cpu()
    clock = DeviceClock()
    started = time.perf_counter()
    spans: list[DeviceSpan] = []
    for number in range(3):
        began = clock.begin()
        for _ in range(20):
            matrix = matrix @ matrix * 0
        spans.append(clock.end(began))
        if number == 1:
            spans[-1].wait()
            time.sleep(0.05)
    spans[-1].wait()
    wall = time.perf_counter() - started
    assert spans[0].idle_seconds == 0  # there was no step before
    assert all(span.seconds > 0 for span in spans)
    assert spans[1].idle_seconds < spans[2].idle_seconds
    assert spans[2].idle_seconds >= 0.05
    assert sum(span.seconds + span.idle_seconds for span in spans) <= wall
