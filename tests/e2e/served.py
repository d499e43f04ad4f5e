"""What tests ask of a server process, and of its worker."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.request import urlopen

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


async def scrape(ports: dict[str, int]) -> dict[str, float]:
    """Every series of a server's metrics, by its name and labels."""

    def read() -> str:
        with urlopen(f"http://127.0.0.1:{ports['metrics']}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    lines = (await asyncio.to_thread(read)).splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


async def until_idle(client: Client) -> None:
    """Nothing runs or waits, and no page is held."""
    async with asyncio.timeout(30):
        while True:
            load = await client.load()
            if not (load.running_requests or load.queued_requests or load.used_pages):
                return
            await asyncio.sleep(0.02)
