"""The Worker RPCs."""

import queue
import threading
from collections.abc import Iterator
from typing import NoReturn

import grpc

from stemserve.proto.v1 import worker_pb2, worker_pb2_grpc
from stemserve.worker.blobs import BadPlan
from stemserve.worker.choice.dispatch import NoStrategy
from stemserve.worker.runner import ModelRunner
from stemserve.worker.stall_clock import StallClock
from stemserve.worker.step_thread import Outcome, StepThread, failed_step

HANDOVER_S = 1.0  # for a cancelled stream to end before the next

_Outcomes = queue.SimpleQueue[Outcome | None]  # None: the stream ends


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        facts: worker_pb2.DescribeResponse,
        runner: ModelRunner,
        steps: StepThread,
        clock: StallClock,
    ) -> None:
        """`clock` of results that are waited for."""
        self._clock = clock
        self._facts = facts
        self._runner = runner
        self._steps = steps
        self._stream_lock = threading.Lock()
        self._outcomes: _Outcomes = queue.SimpleQueue()  # of the stream that runs
        self._readers: list[threading.Thread] = []
        self._is_stopping = threading.Event()

    def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> worker_pb2.DescribeResponse:
        return self._facts

    def Predict(
        self, request: worker_pb2.PredictRequest, context: grpc.ServicerContext
    ) -> worker_pb2.PredictResponse:
        try:
            return self._runner.predict(request.plan)
        except BadPlan as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"bad plan: {error}")
        except NoStrategy as error:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def Run(
        self, request_iterator: Iterator[worker_pb2.RunRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.RunResponse]:
        if not self._stream_lock.acquire(timeout=HANDOVER_S):
            # Two services would write into the same pages.
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, "another service runs steps here")
        try:
            yield from self._answers(request_iterator, context)
        finally:
            self._stream_lock.release()
        if self._is_stopping.is_set():
            _abort(context, grpc.StatusCode.UNAVAILABLE, "the worker is stopping")

    def stop(self) -> None:
        """End the stream once its plans are answered."""
        self._is_stopping.set()
        self._steps.after_all(lambda: self._outcomes.put(None))

    def join(self) -> None:
        """Once all calls have ended."""
        for reader in self._readers:
            reader.join()

    def _answers(
        self, requests: Iterator[worker_pb2.RunRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.RunResponse]:
        outcomes: _Outcomes = queue.SimpleQueue()
        self._outcomes = outcomes
        if self._is_stopping.is_set() or not context.add_callback(lambda: outcomes.put(None)):
            return
        reader = threading.Thread(target=self._read, args=(requests, context, outcomes))
        self._readers = [r for r in self._readers if r.is_alive()] + [reader]
        reader.start()
        while (outcome := outcomes.get()) is not None:
            with self._clock.running():
                result = _result(outcome)
            yield worker_pb2.RunResponse(result=result)

    def _read(
        self,
        requests: Iterator[worker_pb2.RunRequest],
        context: grpc.ServicerContext,
        outcomes: _Outcomes,
    ) -> None:
        """Takes plans while earlier ones run."""
        try:
            for request in requests:
                self._steps.submit(request.plan, outcomes.put, context.is_active)
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


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("abort returned")
