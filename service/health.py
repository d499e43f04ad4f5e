"""Answer grpc.health.v1: which services can be called now, and whether the process is alive.

* "" and each service name: SERVING while a call would be served. NOT_SERVING while the model loads,
  from the moment the worker is lost until its successor is ready, and from the start of a drain.
  Use it for readiness.
* "liveness": SERVING as long as the step loop answers, also while the worker is being restarted and
  during a drain. NOT_SERVING means that only a restart of the process helps.
* Any other name is NOT_FOUND.
"""

from collections.abc import Sequence

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio

LIVENESS = "liveness"
SERVICE_NAME = "grpc.health.v1.Health"


class Health:
    """Readiness and liveness of one server. The servicer may be added to several ports."""

    def __init__(self, services: Sequence[str]) -> None:
        self._readiness = ("", *services)
        self._serving = False
        self._draining = False
        self.servicer = aio.HealthServicer()

    @property
    def serving(self) -> bool:
        return self._serving

    async def start(self) -> None:
        """Call before the first port opens: the library starts with "" as SERVING."""
        await self._set(self._readiness, serving=False)
        await self._set((LIVENESS,), serving=True)

    async def set_serving(self, serving: bool) -> None:
        if not self._draining:
            self._serving = serving
            await self._set(self._readiness, serving=serving)

    async def set_alive(self, alive: bool) -> None:
        await self._set((LIVENESS,), serving=alive)

    async def drain(self) -> None:
        """NOT_SERVING from now on, whatever happens to the worker."""
        await self.set_serving(False)
        self._draining = True

    async def _set(self, names: Sequence[str], *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in names:
            await self.servicer.set(name, status.SERVING if serving else status.NOT_SERVING)
