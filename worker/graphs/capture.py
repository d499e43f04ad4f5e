"""Captures work on a CUDA device as graphs that share one pool of memory."""

import gc
from collections.abc import Callable
from typing import Protocol

import torch


class Capture(Protocol):
    """Makes a piece of work repeatable: what it returns does the work again, on the same memory."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]: ...


class GraphCapture:
    """Captured graphs must be replayed one after the other, in the order of their capture: a
    later one may use the memory of an earlier one's intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        gc.collect()  # what is freed in the middle of a capture would spoil it

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs the work once, and then captures it."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


def run_again(work: Callable[[], None]) -> Callable[[], None]:
    """On a device without graphs the work is done anew each time."""
    return work


def make_capture(device: torch.device) -> Capture:
    return GraphCapture(device) if device.type == "cuda" else run_again
