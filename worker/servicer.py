"""The Worker RPCs."""

from collections.abc import Iterator
from contextlib import closing
from typing import NoReturn

import grpc

from stemserve.proto.v1 import worker_pb2, worker_pb2_grpc
from stemserve.worker.blobs import BadPlan
from stemserve.worker.choice.dispatch import NoStrategy
from stemserve.worker.plan_streams import PlanStreams, StreamTaken, WorkerStops
from stemserve.worker.runner import ModelRunner


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self, facts: worker_pb2.DescribeResponse, runner: ModelRunner, streams: PlanStreams
    ) -> None:
        self._facts = facts
        self._runner = runner
        self._streams = streams

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
        plans = (request.plan for request in request_iterator)
        try:
            with closing(self._streams.results(plans, context)) as results:
                for result in results:
                    yield worker_pb2.RunResponse(result=result)
        except StreamTaken as error:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except WorkerStops as error:
            _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("abort returned")
