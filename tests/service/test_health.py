"""grpc.health.v1 over a real port."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from stemserve.service.serving.health import LIVENESS, Health

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
SERVICES = ["stemserve.v1.Inference", "stemserve.v1.Info"]


class Probe:
    """A health client; the library's stubs leave its calls untyped."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = HealthStub(channel)

    async def check(self, service: str) -> int:
        answer = await self._stub.Check(HealthCheckRequest(service=service))
        return int(answer.status)

    async def readiness(self) -> set[int]:
        return {await self.check(name) for name in ("", *SERVICES)}

    def watch(self, service: str) -> Any:
        return self._stub.Watch(HealthCheckRequest(service=service))


@pytest.fixture
def health() -> Health:
    return Health(SERVICES, note_serving=lambda serving: None)


@pytest.fixture
async def probe(health: Health) -> AsyncIterator[Probe]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((health.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Probe(channel)
    await server.stop(None)


async def test_b55_nothing_serves_until_services_and_worker_are_there(
    health: Health, probe: Probe
) -> None:
    assert await probe.readiness() == {NOT_SERVING}
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await probe.check("nope")
    health.set_worker_ready(True)
    assert await probe.readiness() == {NOT_SERVING}
    health.open()
    assert await probe.readiness() == {SERVING}


async def test_b55_an_unknown_service_is_not_found(probe: Probe) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await probe.check("nope")
    assert failure.value.code() == grpc.StatusCode.NOT_FOUND


async def test_b55_a_lost_worker_ends_readiness_but_not_liveness(
    health: Health, probe: Probe
) -> None:
    health.open()
    health.set_worker_ready(True)
    health.set_worker_ready(False)
    assert await probe.readiness() == {NOT_SERVING}
    assert await probe.check(LIVENESS) == SERVING
    health.set_alive(False)
    assert await probe.check(LIVENESS) == NOT_SERVING


async def test_a_drain_is_for_good(health: Health, probe: Probe) -> None:
    health.open()
    health.drain()
    health.set_worker_ready(True)
    assert await probe.readiness() == {NOT_SERVING}


async def test_a_watcher_hears_each_change(health: Health, probe: Probe) -> None:
    health.open()
    watch = probe.watch("")
    heard = [(await watch.read()).status]
    for ready in (True, False):
        health.set_worker_ready(ready)
        heard.append((await watch.read()).status)
    watch.cancel()
    assert heard == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_watcher_of_an_unknown_service_is_told_so(probe: Probe) -> None:
    watch = probe.watch("nope")
    assert (await watch.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
