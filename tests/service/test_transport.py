"""What the transport bounds: open calls, metadata, messages, time and the age of connections."""

import asyncio
import struct
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.relay import Relay
from tests.service.serving import BYTE_VOCABULARY, Served, serving
from tests.service.test_authentication import BY_KEY, KEYS, TENANTS
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc
from stemserve.service.client import Access, ClientError
from stemserve.service.config.server import ServerConfig
from stemserve.service.limits import Limits
from stemserve.service.serving.server import SPARE_STREAMS

MODE = inference_pb2.LogLikelihood()
REQUEST = inference_pb2.ScoreRequest(query="q", items=["a"], log_likelihood=MODE)
SETTINGS, PING, ACK = 4, 6, 1
MAX_CONCURRENT_STREAMS = 3
GENERATION = inference_pb2.GenerateRequest(prompt=inference_pb2.Context(text="a"))


def byte_engine(*, held: bool = False) -> BigramEngine:
    engine = BigramEngine(random_bigrams(BYTE_VOCABULARY))
    if held:
        engine.hold.clear()
    return engine


def inference(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)


async def score(served: Served) -> None:
    await served.client.score(["a"], MODE, query="q")


async def test_a_call_above_the_limit_is_told_when_to_retry_and_health_still_answers() -> None:
    engine = byte_engine(held=True)
    async with serving(engine, limits=Limits(max_concurrent_calls=2)) as served:
        running = [asyncio.create_task(score(served)) for _ in range(2)]
        await until(lambda: engine.running == 2)
        with pytest.raises(ClientError, match="2 calls are open") as refused:
            await score(served)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.retry_after_s == 1.0
        assert served.metric("admission_rejected_total", reason="queue_full", tenant="other") == 1
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        assert await health.Check(health_pb2.HealthCheckRequest())
        engine.hold.set()
        await asyncio.gather(*running)
        await score(served)


async def test_an_open_stream_of_calls_takes_one_place() -> None:
    async with serving(byte_engine(), limits=Limits(max_concurrent_calls=1)) as served:
        stream = inference(served.channel).ScoreStream()
        await stream.write(inference_pb2.ScoreStreamRequest(request=REQUEST))
        assert (await stream.read()).HasField("response")
        with pytest.raises(ClientError, match="1 calls are open"):
            await score(served)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await score(served)


async def test_who_may_not_call_takes_no_place() -> None:
    engine = byte_engine(held=True)
    limits = Limits(max_concurrent_calls=1)
    access = Access(key=KEYS["mail"])
    async with serving(
        engine, limits=limits, auth=BY_KEY, tenants=TENANTS, access=access
    ) as served:
        running = asyncio.create_task(score(served))
        await until(lambda: engine.running == 1)
        async with grpc.aio.insecure_channel(served.target) as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await inference(stranger).Score(REQUEST)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        engine.hold.set()
        await running


@pytest.mark.parametrize(("size", "code"), [(2_000, "OK"), (5_000, "RESOURCE_EXHAUSTED")])
async def test_metadata_is_bounded(size: int, code: str) -> None:
    """And the other calls of the connection go on."""
    engine = byte_engine(held=True)
    async with serving(engine, limits=Limits(max_metadata_bytes=4_096)) as served:
        beside = inference(served.channel).Score(REQUEST)
        await until(lambda: engine.running == 1)
        call = inference(served.channel).Score(REQUEST, metadata=[("x", "v" * size)])
        if code == "OK":
            await until(lambda: engine.running == 2)
        else:
            assert (await call.code()).name == code
        engine.hold.set()
        assert (await call.code()).name == code
        assert await beside.code() is grpc.StatusCode.OK


async def test_a_message_above_the_limit_is_refused_before_it_is_read() -> None:
    async with serving(byte_engine(), limits=Limits(max_message_bytes=10_000)) as served:
        with pytest.raises(ClientError, match="larger than max") as refused:
            await served.client.score(["a" * 20_000], MODE, query="q")
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await score(served)


async def test_a_call_without_a_deadline_gets_the_default_one() -> None:
    engine = byte_engine(held=True)
    config = ServerConfig(default_deadline_s=0.2)
    async with serving(engine, server_config=config) as served:
        for call in (
            inference(served.channel).Score(REQUEST),
            inference(served.channel).Generate(GENERATION),
        ):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "longer than 0.2 s, the default here" in await call.details()
        assert engine.running == 0
        assert all(job.deadline is not None for job in engine.jobs)
        patient = inference(served.channel).Score(REQUEST, timeout=60)
        await until(lambda: engine.running == 1)
        await asyncio.sleep(0.4)
        engine.hold.set()
        assert await patient.code() is grpc.StatusCode.OK


async def test_each_call_of_a_stream_has_the_default_deadline_and_the_stream_has_none() -> None:
    engine = byte_engine()
    config = ServerConfig(default_deadline_s=0.2)
    async with serving(engine, server_config=config) as served:
        stream = inference(served.channel).ScoreStream()
        for _ in range(2):
            await stream.write(inference_pb2.ScoreStreamRequest(request=REQUEST))
            assert (await stream.read()).HasField("response")
            await asyncio.sleep(0.3)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    first, second = (job.deadline for job in engine.jobs)
    assert first is not None and second is not None
    assert second - first > 0.2


async def test_without_a_default_a_call_has_no_deadline() -> None:
    engine = byte_engine()
    async with serving(engine) as served:
        await inference(served.channel).Score(REQUEST)
    assert engine.jobs[0].deadline is None


@pytest.mark.parametrize("grace_s", [0.0, 0.2])
async def test_an_old_connection_is_replaced_and_its_call_has_the_grace(grace_s: float) -> None:
    engine = byte_engine(held=True)
    config = ServerConfig(max_connection_age_s=0.3, max_connection_age_grace_s=grace_s)
    async with serving(engine, server_config=config) as served:
        call = inference(served.channel).Score(REQUEST)
        await until(lambda: engine.running == 1)
        assert served.channel.get_state() is grpc.ChannelConnectivity.READY
        async with asyncio.timeout(30):
            await served.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            if grace_s:
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
                await until(lambda: engine.running == 0)
        engine.hold.set()
        if not grace_s:
            assert await call.code() is grpc.StatusCode.OK
        assert await inference(served.channel).Score(REQUEST, timeout=30)


async def test_a_client_whose_network_vanishes_is_given_up() -> None:
    engine = byte_engine(held=True)
    config = ServerConfig(keepalive_s=1.0, keepalive_timeout_s=0.5)
    async with (
        serving(engine, server_config=config) as served,
        Relay.to(served.target) as relay,
        grpc.aio.insecure_channel(relay.target) as channel,
    ):
        call = inference(channel).Score(REQUEST)
        await until(lambda: engine.running == 1)
        relay.vanish()
        await until(lambda: engine.running == 0)
        call.cancel()


async def test_a_connection_is_told_how_many_calls_it_may_have() -> None:
    async with serving(byte_engine(), limits=Limits(max_concurrent_calls=7)) as served:
        reader, writer = await asyncio.open_connection("localhost", served.target.split(":")[1])
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
        length = int.from_bytes((await reader.readexactly(9))[:3], "big")
        payload = await reader.readexactly(length)
        settings = dict(struct.iter_unpack(">HI", payload))
        assert settings[MAX_CONCURRENT_STREAMS] == 7 + SPARE_STREAMS
        writer.close()


@pytest.mark.parametrize(("strikes", "ends"), [(2, True), (0, False)])
async def test_a_client_that_pings_too_often_is_told_to_go(strikes: int, ends: bool) -> None:
    config = ServerConfig(max_ping_strikes=strikes)
    async with serving(byte_engine(), server_config=config) as served:
        reader, writer = await asyncio.open_connection("localhost", served.target.split(":")[1])
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
        writer.write(frame(PING, bytes(8)) * 8)
        heard = b""
        while b"too_many_pings" not in heard and heard.count(frame(PING, bytes(8), ACK)) < 8:
            async with asyncio.timeout(30):
                heard += await reader.read(4096)
        assert (b"too_many_pings" in heard) is ends
        writer.close()
        await score(served)


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """Of HTTP/2, for the whole connection (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + payload
