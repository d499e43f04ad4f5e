"""What tests ask of a server process, and of its worker."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client


async def check_health(port: int, service: str = "") -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = HealthStub(channel)
        return int((await stub.Check(HealthCheckRequest(service=service), timeout=30.0)).status)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


async def generate_to_the_end(client: Client, *, tokens: int, n: int = 1) -> None:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text="Once"), max_new_tokens=tokens, ignore_eos=True, n=n
    )
    async for _ in client.generate(request):
        pass


async def until_running(client: Client, count: int) -> None:
    while (await client.load()).running_requests < count:
        await asyncio.sleep(0.01)
