"""A client that stops reading its stream, beside others that read."""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.e2e.served import generate_to_the_end

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc
from stemserve.service.client import Client

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
SAMPLES = 16
MAX_UNREAD_TOKENS = 512


def endless_generation() -> inference_pb2.GenerateRequest:
    """As long as the context of the fake worker allows: it must be cut, it does not end."""
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text="once upon a time"),
        max_new_tokens=1_000_000,
        ignore_eos=True,
        n=SAMPLES,
        top_logprobs=20,
    )


@pytest.fixture
def ports(
    start_server: StartServer, fake_worker: Callable[..., str], tiny_model: Path, tmp_path: Path
) -> dict[str, int]:
    config = tmp_path / "stemserve.toml"
    config.write_text(f"[limits]\nmax_unread_tokens = {MAX_UNREAD_TOKENS}\n")
    address = fake_worker("--vocab-size", 258, "--context-tokens", 100_000, "--kv-pages", 200_000)
    _, ports = start_server("--model", tiny_model, "--worker", address, "--config", config)
    return ports


async def test_a_client_that_stops_reading_is_cut_and_its_pages_come_back(
    ports: dict[str, int],
) -> None:
    target = f"127.0.0.1:{ports['rpc']}"
    async with Client(target) as client, grpc.aio.insecure_channel(target) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        slow = stub.Generate(endless_generation())
        assert await slow.read()
        async with asyncio.timeout(60):
            while (await client.load()).running_requests:
                await generate_to_the_end(client, tokens=5)  # others are served meanwhile
        load = await client.load()
        assert (load.used_pages, load.queued_requests) == (0, 0)
        async with asyncio.timeout(60):
            with pytest.raises(grpc.aio.AioRpcError, match="wait for the client to read") as cut:
                while await slow.read():  # what was on its way
                    pass
        assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await generate_to_the_end(client, tokens=5)


async def test_a_client_that_stops_reading_and_then_leaves_is_forgotten(
    ports: dict[str, int],
) -> None:
    target = f"127.0.0.1:{ports['rpc']}"
    async with Client(target) as client:
        async with grpc.aio.insecure_channel(target) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            streams = [stub.Generate(endless_generation()) for _ in range(4)]
            for stream in streams:
                assert await stream.read()
            async with asyncio.timeout(60):
                while (await client.load()).running_requests:
                    await asyncio.sleep(0.05)
        assert (await client.load()).used_pages == 0
        await generate_to_the_end(client, tokens=5)
