"""Statuses and counts of calls that abort or fail."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from tests.service.bigram_engine import BigramEngine
from tests.service.serving import serving
from tests.service.waiting import until

from stemserve.service.client import Client, ClientError
from stemserve.service.errors import SlowReader
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.serving import call_status
from stemserve.service.serving.call_status import CallStatus


async def refuse(request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")


async def fail(request: Any, context: Any) -> None:
    raise NotImplementedError


@asynccontextmanager
async def info_server(registry: CollectorRegistry, get_model: Any) -> AsyncGenerator[Client, None]:
    server = grpc.aio.server(interceptors=[CallStatus(Metrics(registry))])
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "GetModel": grpc.unary_unary_rpc_method_handler(get_model)
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("stemserve.v1.Info", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        yield client
    await server.stop(None)


def finished(registry: CollectorRegistry, code: str) -> float | None:
    labels = {"method": "get_model", "code": code, "tenant": "other"}
    return registry.get_sample_value("stemserve_requests_total", labels)


async def test_a_call_that_a_handler_aborts_keeps_its_status_and_is_counted() -> None:
    registry = CollectorRegistry()
    async with info_server(registry, refuse) as client:
        with pytest.raises(ClientError, match="draining") as refusal:
            await client.model()
        assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
        # The client tries a call that is unavailable three times.
        # A status may reach its client before the server goes on.
        await until(lambda: finished(registry, "UNAVAILABLE") == 3)


async def test_a_handler_that_raises_is_internal() -> None:
    registry = CollectorRegistry()
    async with info_server(registry, fail) as client:
        with pytest.raises(ClientError, match="NotImplementedError") as failure:
            await client.model()
        assert failure.value.code is grpc.StatusCode.INTERNAL
        await until(lambda: finished(registry, "INTERNAL") == 1)


INFERENCE = "stemserve.v1.Inference"
MALFORMED = b"\x1a\xffnot a message"


@pytest.mark.parametrize("method", ["Inference/Score", "Prefixes/List", "Info/GetLoad"])
async def test_bytes_that_are_not_a_message_are_an_invalid_argument(method: str) -> None:
    async with serving(BigramEngine()) as served:
        call = raw(served.channel.unary_unary(f"/stemserve.v1.{method}"))
        with pytest.raises(grpc.aio.AioRpcError, match="not a message") as refusal:
            await call(MALFORMED)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert served.metric("admission_rejected_total", reason="invalid", tenant="other") == 1


async def test_bytes_that_are_not_a_message_end_a_stream_as_an_invalid_argument() -> None:
    async with serving(BigramEngine()) as served:
        generate = raw(served.channel.unary_stream("/stemserve.v1.Inference/Generate"))
        with pytest.raises(grpc.aio.AioRpcError, match="not a message") as refusal:
            await anext(aiter(generate(MALFORMED)))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        score = raw(served.channel.stream_stream("/stemserve.v1.Inference/ScoreStream"))
        with pytest.raises(grpc.aio.AioRpcError, match="not a message") as refusal:
            await anext(aiter(score([MALFORMED])))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def raw(call: Any) -> Any:
    """A call of bytes; the stubs want messages."""
    return call


async def flood(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
    """More than a stream takes that nobody reads; cut while it waits."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.3, task.cancel, SlowReader("read faster"))
    while True:
        yield bytes(100_000)


async def test_a_call_ends_also_where_its_client_never_takes_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_status, "STATUS_S", 0.3)
    registry = CollectorRegistry()
    server = grpc.aio.server(interceptors=[CallStatus(Metrics(registry))])
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(flood)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    labels = {"method": "generate", "code": "RESOURCE_EXHAUSTED", "tenant": "other"}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = raw(channel.unary_stream(f"/{INFERENCE}/Generate"))(b"")
        await call.wait_for_connection()
        await until(lambda: registry.get_sample_value("stemserve_requests_total", labels) == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="read faster"):  # should it read after all
            while await call.read():
                pass
    await server.stop(None)
