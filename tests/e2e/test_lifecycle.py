"""A server process from start to stop, over a worker that computes nothing."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_reflection.v1alpha import reflection_pb2
from tests.e2e.served import check_health, until_running

from stemserve.proto.v1 import inference_pb2, tries_pb2, tries_pb2_grpc
from stemserve.service.client import Client, ClientError
from stemserve.service.client.errors import client_error

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
Words = Callable[..., list[str]]
LIKELIHOOD = inference_pb2.LogLikelihood()
SERVICES = ("Inference", "Prefixes", "Tries", "Info")
NAMES = ("", *(f"stemserve.v1.{name}" for name in SERVICES))


def client_of(ports: dict[str, int], timeout_s: float = 60.0) -> Client:
    return Client(f"127.0.0.1:{ports['rpc']}", timeout_s=timeout_s)


def long_generation(tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text="once"), max_new_tokens=tokens, ignore_eos=True, n=2
    )


async def until_draining(port: int) -> None:
    async with asyncio.timeout(30):
        while await check_health(port) != HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.01)


async def count_tokens(client: Client, request: inference_pb2.GenerateRequest) -> int:
    return sum(
        [len(news.token_ids) async for step in client.generate(request) for news in step.news]
    )


@pytest.fixture
def serve_fake(
    start_server: StartServer, fake_worker: Callable[..., str], tiny_model: Path
) -> StartServer:
    """A server over a fake worker of 50 ms a step."""

    def start(*options: object) -> tuple["subprocess.Popen[str]", dict[str, int]]:
        address = fake_worker("--step-seconds", 0.05, "--vocab-size", 258)
        return start_server("--model", tiny_model, "--worker", address, *options)

    return start


async def test_b55_every_name_is_healthy_on_both_ports(serve_fake: StartServer) -> None:
    _, ports = serve_fake()
    for port in (ports["rpc"], ports["health"]):
        for name in (*NAMES, "liveness"):
            assert await check_health(port, name) == HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await check_health(port, "nope")
        assert failure.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_the_services(serve_fake: StartServer, version: str) -> None:
    _, ports = serve_fake()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['rpc']}") as channel:
        info: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = info()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        await call.write(
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="stemserve.v1.Info")
        )
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()
    assert set(NAMES[1:]) <= listed
    described = [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]
    assert "Info" in {service.name for file in described for service in file.service}


async def test_the_metrics_port_tells_of_calls(serve_fake: StartServer) -> None:
    _, ports = serve_fake()
    async with client_of(ports) as client:
        await client.score(["a", "b"], LIKELIHOOD, query="q")
    url = f"http://127.0.0.1:{ports['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    assert re.search(r'stemserve_requests_total\{code="OK",method="score".*\} 1\.0', text)
    assert "stemserve_ready 1.0" in text


async def test_b54_sigterm_lets_running_streams_end_and_refuses_new_calls(
    serve_fake: StartServer,
) -> None:
    server, ports = serve_fake()
    async with client_of(ports) as client:
        await client.score(["a"], LIKELIHOOD, query="q")
        streams = [asyncio.create_task(count_tokens(client, long_generation(40))) for _ in range(4)]
        await until_running(client, 4)
        server.send_signal(signal.SIGTERM)
        await until_draining(ports["health"])
        assert await check_health(ports["rpc"], NAMES[1]) == HealthCheckResponse.NOT_SERVING
        with pytest.raises(ClientError, match="UNAVAILABLE: the server is shutting down"):
            await client.score(["a"], LIKELIHOOD, query="q")
        assert await asyncio.gather(*streams) == [80] * 4
    assert await asyncio.to_thread(server.wait, 30) == 0


async def test_b54_a_drain_ends_at_its_limit(serve_fake: StartServer) -> None:
    server, ports = serve_fake("--drain-seconds", 0.3)
    async with client_of(ports) as client:
        stream = asyncio.create_task(count_tokens(client, long_generation(4000)))
        await until_running(client, 1)
        server.send_signal(signal.SIGTERM)
        with pytest.raises(ClientError, match="UNAVAILABLE: the server is shutting down"):
            await stream
    assert await asyncio.to_thread(server.wait, 30) == 0


async def test_b54_an_upload_that_a_drain_cuts_is_unavailable(serve_fake: StartServer) -> None:
    server, ports = serve_fake("--drain-seconds", 0.3)

    async def texts() -> AsyncGenerator[tries_pb2.UploadTrieRequest, None]:
        for number in count():
            yield tries_pb2.UploadTrieRequest(texts=[f"text {number}"])
            await asyncio.sleep(0.001)

    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['rpc']}") as channel:
        stub: Any = tries_pb2_grpc.TriesStub(channel)
        call = stub.UploadTrie(texts(), timeout=60.0)
        await call.wait_for_connection()
        server.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await call
    assert client_error(cut.value).code is grpc.StatusCode.UNAVAILABLE, cut.value
    assert await asyncio.to_thread(server.wait, 30) == 0


async def test_b54_a_second_sigterm_ends_at_once(serve_fake: StartServer) -> None:
    server, ports = serve_fake()
    async with client_of(ports) as client:
        stream = asyncio.create_task(count_tokens(client, long_generation(4000)))
        await until_running(client, 1)
        server.send_signal(signal.SIGTERM)
        await until_draining(ports["health"])
        server.send_signal(signal.SIGTERM)
        with pytest.raises(ClientError, match="UNAVAILABLE"):
            await stream
    assert await asyncio.to_thread(server.wait, 10) == 128 + signal.SIGTERM


@pytest.mark.parametrize("seed", [1, 2])
async def test_b50_cancelled_generations_leave_nothing_running(
    serve_fake: StartServer, seed: int
) -> None:
    """Left at any moment: before admission, in prefill, between tokens."""
    random = Random(seed)
    _, ports = serve_fake()
    async with client_of(ports) as client:
        calls = [
            asyncio.create_task(count_tokens(client, long_generation(4000))) for _ in range(50)
        ]
        for call in random.sample(calls, len(calls)):
            await asyncio.sleep(random.uniform(0.0, 0.02))
            call.cancel()
        async with asyncio.timeout(30):
            while (load := await client.load()).running_requests or load.used_pages:
                await asyncio.sleep(0.02)
        assert load.queued_requests == 0
        await client.score(["a"], LIKELIHOOD, query="q")


async def test_b51_a_deadline_that_passes_is_answered_as_such(serve_fake: StartServer) -> None:
    _, ports = serve_fake()
    async with client_of(ports, timeout_s=0.3) as client:
        with pytest.raises(ClientError, match="DEADLINE_EXCEEDED"):
            await count_tokens(client, long_generation(4000))


def test_a_port_in_use_is_named(stemserve_command: Words, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option in ("--port", "--health-port", "--metrics-port"):
            free = {"--port": 0, "--health-port": 0, "--metrics-port": 0} | {option: port}
            words = [word for pair in free.items() for word in pair]
            done = subprocess.run(
                stemserve_command(
                    "serve", *words, "--model", tiny_model, "--worker", "unix:/nowhere"
                ),
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 1
            assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
            assert option in done.stderr
            assert len(done.stderr.splitlines()) == 1, done.stderr


def test_b55_a_server_is_not_serving_while_the_model_loads(
    stemserve_command: Words, fake_worker: Callable[..., str], tiny_model: Path
) -> None:
    port = _free_port()
    address = fake_worker("--describe-seconds", 4.0)
    command = stemserve_command(
        *("serve", "--model", tiny_model, "--worker", address),
        *("--port", 0, "--health-port", port, "--metrics-port", 0),
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        _until_open(port)
        heard = set[int]()
        deadline = time.monotonic() + 60
        while HealthCheckResponse.SERVING not in heard and time.monotonic() < deadline:
            heard.add(asyncio.run(check_health(port)))
        server.terminate()
    assert heard == {HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING}
    assert server.returncode == 0


def test_sigterm_while_the_model_loads_ends_the_server(
    stemserve_command: Words, tiny_model: Path
) -> None:
    port = _free_port()
    command = stemserve_command(
        *("serve", "--model", tiny_model, "--worker", "unix:/nowhere/worker.sock"),
        *("--port", 0, "--health-port", port, "--metrics-port", 0),
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                asyncio.run(check_health(port))
                break
            except grpc.aio.AioRpcError:
                time.sleep(0.05)
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(30) == 0


def _until_open(port: int) -> None:
    """By sockets: gRPC waits longer after each attempt, and would come too late."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
