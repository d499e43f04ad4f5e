"""Answer grpc.health.v1: which services can be called now, and whether the process is alive.

* "" and each service name: SERVING while a call would be served. NOT_SERVING while the model loads,
  from the moment the worker is lost until its successor is ready, while the step loop does not
  answer, and from the start of a drain. Use it for readiness.
* "liveness": SERVING as long as the step loop answers, also while the worker is being restarted and
  during a drain. NOT_SERVING means that only a restart of the process helps.
* Any other name is NOT_FOUND.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

LIVENESS = "liveness"
SERVICE_NAME = "grpc.health.v1.Health"

Context = grpc.aio.ServicerContext[HealthCheckRequest, HealthCheckResponse]


class Health:
    """Readiness and liveness of one server, for any number of ports. Not ready at first."""

    def __init__(self, services: Sequence[str], *, note_serving: Callable[[bool], None]) -> None:
        """`note_serving` hears whether the server is SERVING, at each change."""
        self._note_serving = note_serving
        self._names = ("", *services, LIVENESS)
        self._opened = False
        self._worker_ready = False
        self._alive = True
        self._draining = False
        self._changed = asyncio.Event()  # replaced by each change

    @property
    def serving(self) -> bool:
        return self._opened and self._worker_ready and self._alive and not self._draining

    def open(self) -> None:
        """All services are there."""
        self._opened = True
        self._tell()

    def set_worker_ready(self, ready: bool) -> None:
        self._worker_ready = ready
        self._tell()

    def set_alive(self, alive: bool) -> None:
        self._alive = alive
        self._tell()

    def drain(self) -> None:
        """NOT_SERVING from now on, whatever happens to the worker."""
        self._draining = True
        self._tell()

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    self._check,
                    request_deserializer=HealthCheckRequest.FromString,
                    response_serializer=HealthCheckResponse.SerializeToString,
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self._watch,
                    request_deserializer=HealthCheckRequest.FromString,
                    response_serializer=HealthCheckResponse.SerializeToString,
                ),
            },
        )

    async def _check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        if request.service not in self._names:
            known = ", ".join(repr(name) for name in self._names)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known services: {known}")
        return self._answer(request.service)

    async def _watch(
        self, request: HealthCheckRequest, context: Context
    ) -> AsyncIterator[HealthCheckResponse]:
        """The protocol wants an unknown name to be watched, not refused."""
        told: HealthCheckResponse | None = None
        while True:
            changed = self._changed
            answer = self._answer(request.service)
            if answer != told:
                told = answer
                yield answer
            await changed.wait()

    def _answer(self, service: str) -> HealthCheckResponse:
        if service not in self._names:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        serving = self._alive if service == LIVENESS else self.serving
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)

    def _tell(self) -> None:
        self._note_serving(self.serving)
        self._changed.set()
        self._changed = asyncio.Event()
