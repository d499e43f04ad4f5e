"""Calls before the server is ready, while it drains, and in between."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc
from stemserve.service.client import Client, ClientError
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.serving.call_gate import CallGate
from stemserve.service.serving.call_status import CallStatus

LIKELIHOOD = inference_pb2.LogLikelihood()


class SlowServicer(inference_pb2_grpc.InferenceServicer):
    """Every call ends when the test says so."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.started = asyncio.Event()

    async def Score(self, request: inference_pb2.ScoreRequest, context: Any) -> Any:
        self.started.set()
        await self.finish.wait()
        return inference_pb2.ScoreResponse(shape=[0])

    def ScoreStream(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse()
        await self.finish.wait()
        yield inference_pb2.GenerateResponse(usage=inference_pb2.Usage(output_tokens=7))


class Rig:
    def __init__(self, port: int, gate: CallGate, servicer: SlowServicer) -> None:
        self.gate = gate
        self.servicer = servicer
        self.client = Client(f"127.0.0.1:{port}", timeout_s=30.0)

    async def score(self) -> None:
        await self.client.score(["a"], LIKELIHOOD)

    async def refusal(self) -> str:
        with pytest.raises(ClientError) as failure:
            await self.score()
        assert failure.value.code == grpc.StatusCode.UNAVAILABLE
        assert failure.value.reason == "NOT_READY"
        return failure.value.message


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    gate, servicer = CallGate(max_calls=2), SlowServicer()
    status = CallStatus(Metrics(CollectorRegistry()))
    server = grpc.aio.server(interceptors=[status, gate])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # As main does: the services come once the worker has described itself.
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    rig = Rig(port, gate, servicer)
    async with rig.client:
        yield rig
    await server.stop(None)


async def test_calls_before_the_model_is_loaded_are_refused(rig: Rig) -> None:
    assert "the model is loading" in await rig.refusal()
    with pytest.raises(ClientError, match="the model is loading"):
        async for _ in rig.client.generate(inference_pb2.GenerateRequest()):
            pass


async def test_a_running_call_ends_well_while_new_ones_are_refused(rig: Rig) -> None:
    rig.gate.open()
    running = asyncio.create_task(rig.score())
    await rig.servicer.started.wait()
    rig.gate.drain()
    assert "shutting down" in await rig.refusal()
    assert rig.gate.running_calls == 1
    rig.servicer.finish.set()
    await running
    await rig.gate.wait_idle()


async def test_a_running_stream_is_waited_for(rig: Rig) -> None:
    rig.gate.open()
    stream = rig.client.generate(inference_pb2.GenerateRequest())
    await anext(stream)
    rig.gate.drain()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await rig.gate.wait_idle()
    rig.servicer.finish.set()
    last = await anext(stream)
    assert last.usage is not None and last.usage.output_tokens == 7
    await stream.aclose()
    await rig.gate.wait_idle()


async def test_a_cancelled_call_counts_no_more(rig: Rig) -> None:
    rig.gate.open()
    running = asyncio.create_task(rig.score())
    await rig.servicer.started.wait()
    running.cancel()
    await rig.gate.wait_idle()
    assert rig.gate.running_calls == 0


async def test_what_a_drain_cuts_hears_that_the_server_leaves(rig: Rig) -> None:
    rig.gate.open()
    running = asyncio.create_task(rig.refusal())
    await rig.servicer.started.wait()
    stream = rig.client.generate(inference_pb2.GenerateRequest())
    await anext(stream)
    rig.gate.drain()
    rig.gate.cut()
    assert "shutting down" in await running
    with pytest.raises(ClientError, match="UNAVAILABLE: the server is shutting down"):
        await anext(stream)
    await rig.gate.wait_idle()
