"""Answer grpc.health.v1 of a worker alone, in plaintext: probes have no certificates.

* "" and the worker's service: SERVING once the model is loaded, until the worker ends.
* "liveness": SERVING from the start; NOT_SERVING while a step has run for too long, which only a
  restart of the process ends.
* Any other name is NOT_FOUND.
"""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.config import ConfigError

LIVENESS = "liveness"
SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
HEALTH_SERVICE = "grpc.health.v1.Health"
READINESS = ("", SERVICE_NAME)
RPC_THREADS = 2
OPTIONS = (("grpc.so_reuseport", 0),)  # a port in use is an error, not a second server on it


class WorkerHealth:
    """Check only: whoever wants to watch hears UNIMPLEMENTED."""

    def __init__(self, stalled_s: Callable[[], float], *, step_timeout_s: float) -> None:
        """`stalled_s`: how long the oldest step has run."""
        self._stalled_s = stalled_s
        self._step_timeout_s = step_timeout_s
        self._serving = threading.Event()

    def set_serving(self, serving: bool) -> None:
        if serving:
            self._serving.set()
        else:
            self._serving.clear()

    def handler(self) -> grpc.GenericRpcHandler:
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": check})

    def _check(
        self, request: HealthCheckRequest, context: grpc.ServicerContext
    ) -> HealthCheckResponse:
        if request.service == LIVENESS:
            return _answer(self._stalled_s() <= self._step_timeout_s)
        if request.service not in READINESS:
            known = ", ".join(repr(name) for name in (*READINESS, LIVENESS))
            context.abort(grpc.StatusCode.NOT_FOUND, f"known services: {known}")
        return _answer(self._serving.is_set())


def _answer(serving: bool) -> HealthCheckResponse:
    status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status)


@contextmanager
def health_port(address: str | None, health: WorkerHealth) -> Generator[None]:
    """Answered inside; None: no port. Raises ConfigError."""
    if address is None:
        yield
        return
    with ThreadPoolExecutor(RPC_THREADS, "health") as threads:
        server = grpc.server(threads, handlers=[health.handler()], options=OPTIONS)
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"--health-listen {address}: cannot bind ({error})") from error
        server.start()
        try:
            yield
        finally:
            server.stop(None).wait()
