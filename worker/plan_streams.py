"""Streams of plans that services send, and of their results: one at a time."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import grpc

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.stall_clock import StallClock
from stemserve.worker.step_thread import Outcome, StepThread, failed_step

HANDOVER_S = 1.0  # for a cancelled stream to end before the next

_Outcomes = queue.SimpleQueue[Outcome | None]  # None: the stream ends


class StreamTaken(Exception):
    """Another service runs steps here: two would write into the same pages."""


class WorkerStops(Exception):
    """All plans that came are answered, and there will be no more."""


class Caller(Protocol):
    """Who sends the plans. A gRPC context is one."""

    def is_active(self) -> bool:
        """Whether it still wants results."""
        ...

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """To be called when it no longer does; False: it does not now."""
        ...


class PlanStreams:
    def __init__(self, steps: StepThread, clock: StallClock) -> None:
        """`clock` of results that are waited for."""
        self._clock = clock
        self._steps = steps
        self._lock = threading.Lock()  # held by the stream that runs
        self._outcomes: _Outcomes = queue.SimpleQueue()  # of that stream
        self._readers: list[threading.Thread] = []
        self._is_stopping = threading.Event()

    def results(
        self, plans: Iterator[worker_pb2.StepPlan], caller: Caller
    ) -> Generator[worker_pb2.StepResult]:
        """Of the plans, in order, while later ones are taken. Raises StreamTaken, WorkerStops."""
        if not self._lock.acquire(timeout=HANDOVER_S):
            raise StreamTaken("another service runs steps here")
        try:
            yield from self._answers(plans, caller)
        finally:
            self._lock.release()
        if self._is_stopping.is_set():
            raise WorkerStops("the worker is stopping")

    def stop(self) -> None:
        """End the stream once its plans are answered."""
        self._is_stopping.set()
        self._steps.after_all(lambda: self._outcomes.put(None))

    def join(self) -> None:
        """Once no caller is active."""
        for reader in self._readers:
            reader.join()

    def _answers(
        self, plans: Iterator[worker_pb2.StepPlan], caller: Caller
    ) -> Iterator[worker_pb2.StepResult]:
        outcomes: _Outcomes = queue.SimpleQueue()
        self._outcomes = outcomes
        if self._is_stopping.is_set() or not caller.add_callback(lambda: outcomes.put(None)):
            return
        reader = threading.Thread(target=self._read, args=(plans, caller, outcomes))
        self._readers = [r for r in self._readers if r.is_alive()] + [reader]
        reader.start()
        while (outcome := outcomes.get()) is not None:
            with self._clock.running():
                result = _result(outcome)
            yield result

    def _read(
        self, plans: Iterator[worker_pb2.StepPlan], caller: Caller, outcomes: _Outcomes
    ) -> None:
        """Takes plans while earlier ones run."""
        try:
            for plan in plans:
                self._steps.submit(plan, outcomes.put, caller.is_active)
        except grpc.RpcError:
            return  # cancelled: the callback has ended the stream
        self._steps.after_all(lambda: outcomes.put(None))


def _result(outcome: Outcome) -> worker_pb2.StepResult:
    if isinstance(outcome, worker_pb2.StepResult):
        return outcome
    try:
        return outcome.result()
    except Exception as error:  # an error of a GPU shows here
        return failed_step(outcome.step_id, error)
