"""The Admin service, on a real server and worker."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.e2e.served import generate_to_the_end, until_running

from stemserve.proto.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from stemserve.proto.v1.inference_pb2 import LogLikelihood
from stemserve.proto.v1.prefixes_pb2 import RegisterRequest
from stemserve.service.client import Client

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
Server = tuple["subprocess.Popen[str]", dict[str, int]]


@pytest.fixture
def serve_tiny(start_server: StartServer, tiny_model: Path) -> Callable[..., Server]:
    def start(*options: object) -> Server:
        words: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
        return start_server(*words, "--kv-pages", 100, "--max-step-tokens", 64, *options)

    return start


@pytest.fixture
async def server(serve_tiny: Callable[..., Server]) -> AsyncIterator[Server]:
    yield serve_tiny("--admin-port", 0)


def admin(channel: grpc.aio.Channel) -> Any:
    return admin_pb2_grpc.AdminStub(channel)


async def test_clearing_the_cache_frees_what_nobody_uses_and_ids_stay_valid(server: Server) -> None:
    _, ports = server
    async with (
        Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{ports['admin']}") as channel,
    ):
        await client.register(RegisterRequest(text="a" * 40, prefix_id="loose", warm=True))
        await client.register(RegisterRequest(text="b" * 40, prefix_id="pinned", pin=True))
        before = await client.load()
        freed = (await admin(channel).ClearCache(admin_pb2.ClearCacheRequest())).freed_pages
        after = await client.load()
        assert freed == 3 == before.cached_pages - after.cached_pages
        assert after.free_pages == before.free_pages + freed
        cold, warm = [
            await client.score(
                ["xyz"], LogLikelihood(), contexts=[inference_pb2.Context(prefix_id=name)]
            )
            for name in ("loose", "pinned")
        ]
    # The row of the last token runs again, for its logits.
    assert cold.usage.cached_tokens == 0 and warm.usage.cached_tokens == 39


async def test_draining_lets_a_running_call_finish_and_ends_the_server(server: Server) -> None:
    process, ports = server
    async with (
        Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{ports['admin']}") as channel,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(generate_to_the_end(client, tokens=100))
        await until_running(client, 1)
        await admin(channel).Drain(admin_pb2.DrainRequest())
    assert await asyncio.to_thread(process.wait, 30) == 0


async def test_the_service_is_off_by_default_and_never_on_the_public_port(
    serve_tiny: Callable[..., Server], server: Server
) -> None:
    _, plain = serve_tiny()
    assert "admin" not in plain
    for ports in (plain, server[1]):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['rpc']}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await admin(channel).Drain(admin_pb2.DrainRequest())
        assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED
