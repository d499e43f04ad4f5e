"""Three servers behind a real Envoy with the Helm chart's configuration."""

import asyncio
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from tests.deploy.chart import render, the
from tests.e2e.served import scrape

from stemserve.proto.v1 import inference_pb2, info_pb2, info_pb2_grpc, prefixes_pb2
from stemserve.service.client import Client, ClientError
from stemserve.service.client.channel import OPTIONS
from stemserve.service.client.routing import route
from stemserve.service.metadata_keys import ROUTING_KEY

Started = tuple["subprocess.Popen[str]", dict[str, int]]

SERVERS = 3
KEYS = [f"key-{number}" for number in range(300)]
MODE = inference_pb2.LogLikelihood()
AFFINITY = re.compile(r'stemserve_prefix_affinity_total\{outcome="(\w+)"\}')
DRAIN_DELAY_S = 3  # longer than Envoy's health checks take to notice


def free_port() -> int:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


@dataclass(frozen=True, kw_only=True)
class Fleet:
    target: str  # Envoy's
    servers: dict[str, "subprocess.Popen[str]"]  # by the name of the model, one for each
    ports: list[dict[str, int]]  # of each

    def running(self) -> list[str]:
        return [name for name, server in self.servers.items() if server.poll() is None]

    async def owner(self, channel: grpc.aio.Channel, key: str) -> str:
        """The server to which calls of a key go."""
        stub: Any = info_pb2_grpc.InfoStub(channel)
        request = info_pb2.GetModelRequest()
        name: str = (await stub.GetModel(request, metadata=((ROUTING_KEY, key),), timeout=10)).model
        return name

    async def owners(self) -> dict[str, str]:
        async with grpc.aio.insecure_channel(self.target, OPTIONS) as channel:
            # One by one: Envoy sends some of many open calls elsewhere.
            return {key: await self.owner(channel, key) for key in KEYS}

    async def until_left(self, name: str) -> None:
        """Envoy sends nothing to the server any more."""
        async with asyncio.timeout(20):
            while name in (await self.owners()).values():
                await asyncio.sleep(0.1)


def envoy_config(ports: list[int], *, calls: int, status: int, admin: int) -> Any:
    """The chart's, for servers on this machine."""
    objects = render({"replicas": len(ports)})
    config = yaml.safe_load(the(objects, "ConfigMap", "x-stemserve-router")["data"]["envoy.yaml"])
    resources = config["static_resources"]
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    for listener, port in zip(resources["listeners"], (calls, status), strict=True):
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    admins, servers = resources["clusters"]
    for cluster, found in ((admins, [admin]), (servers, ports)):
        ends = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        for end, port in zip(ends, found, strict=True):
            end["endpoint"]["address"]["socket_address"] = {
                "address": "127.0.0.1",
                "port_value": port,
            }
    return config


@pytest.fixture(scope="module")
def fleet(
    start_server: Callable[..., Started], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")

    def start(name: str) -> Started:
        shutil.copytree(tiny_model, folder / name)
        words = ("--model", folder / name, "--load-format", "dummy", "--threads", 1)
        return start_server(*words, "--kv-pages", 400, "--drain-delay-seconds", DRAIN_DELAY_S)

    names = [f"server-{number}" for number in range(SERVERS)]
    with ThreadPoolExecutor(SERVERS) as threads:
        started = dict(zip(names, threads.map(start, names), strict=True))
    calls, status, admin = (free_port() for _ in range(3))
    ports = [ports["rpc"] for _, ports in started.values()]
    config = folder / "envoy.json"
    config.write_text(json.dumps(envoy_config(ports, calls=calls, status=status, admin=admin)))
    command: list[str | Path] = [
        *(Path(sys.executable).with_name("envoy"), "--config-path", config),
        *("--disable-hot-restart", "--concurrency", "1", "--log-level", "error"),
    ]
    servers = {name: process for name, (process, _) in started.items()}
    with subprocess.Popen(command) as envoy:
        try:
            all_ports = [ports for _, ports in started.values()]
            fleet = Fleet(target=f"127.0.0.1:{calls}", servers=servers, ports=all_ports)
            asyncio.run(until_all_are_there(fleet))
            yield fleet
        finally:
            for server in servers.values():
                server.kill()
            envoy.terminate()


async def until_all_are_there(fleet: Fleet) -> None:
    async with asyncio.timeout(30):
        while True:
            with suppress(grpc.aio.AioRpcError):
                if set((await fleet.owners()).values()) == set(fleet.servers):
                    return
            await asyncio.sleep(0.1)


async def affinity(fleet: Fleet) -> Counter[str]:
    """Of all servers, by outcome."""
    outcomes = Counter[str]()
    for ports in fleet.ports:
        for name, value in (await scrape(ports)).items():
            if found := AFFINITY.fullmatch(name):
                outcomes[found[1]] += int(value)
    return outcomes


async def test_calls_of_a_context_or_prefix_meet_on_one_server(fleet: Fleet) -> None:
    """Each finds in the cache what the one before left there, whichever client sends it."""
    texts = [
        f"{number} is the number of a context that several calls share." for number in range(12)
    ]
    before = await affinity(fleet)
    async with Client(fleet.target) as one, Client(fleet.target) as other:
        for text in texts:
            await one.score([" a"], MODE, query=text)
            again = await other.score([" b", " c"], MODE, query=text)
            assert again.usage.cached_tokens >= len(text) - 1, text
    outcomes = await affinity(fleet) - before
    assert outcomes.total() == 2 * len(texts) == outcomes["home"] + outcomes["first"]
    assert outcomes["home"] >= len(texts)
    owners = await fleet.owners()
    assert set(owners.values()) == set(fleet.running())
    for name in fleet.running():
        assert list(owners.values()).count(name) > len(KEYS) / SERVERS / 2


async def test_many_open_calls_of_one_prefix_spill_to_other_servers(fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(fleet.target) as channel, asyncio.timeout(20):
        alone = {await fleet.owner(channel, "hot") for _ in range(5)}
        assert len(alone) == 1
        together = alone
        while not together > alone:
            calls = [fleet.owner(channel, "hot") for _ in range(200)]
            together = set(await asyncio.gather(*calls))


async def test_a_killed_servers_prefixes_move_and_no_others(fleet: Fleet) -> None:
    before = await fleet.owners()
    async with Client(fleet.target, reregister=True) as client, Client(fleet.target) as plain:
        register = prefixes_pb2.RegisterRequest
        prefixes = [await client.register(register(text=f"prefix {n}")) for n in range(6)]
        child = await client.register(
            register(text=" and more", parent_prefix_id=prefixes[0].prefix_id)
        )
        async with grpc.aio.insecure_channel(fleet.target) as channel:
            ((_, key),) = route(prefixes_pb2.GetRequest(prefix_id=child.prefix_id))
            victim = await fleet.owner(channel, key)
        fleet.servers[victim].kill()
        await fleet.until_left(victim)
        during = await fleet.owners()
        stayed = [key for key in KEYS if before[key] != victim]
        moved = [key for key in stayed if during[key] != before[key]]
        assert len(moved) < 0.05 * len(stayed)
        assert set(during.values()) == set(fleet.running())
        with pytest.raises(ClientError) as failure:
            await plain.get_prefix(child.prefix_id)
        assert failure.value.code is grpc.StatusCode.NOT_FOUND
        for prefix in (*prefixes, child):
            contexts = [inference_pb2.Context(prefix_id=prefix.prefix_id)]
            assert not (await client.score([" a"], MODE, contexts=contexts)).errors
        assert (await plain.get_prefix(child.prefix_id)).token_count == child.token_count


@asynccontextmanager
async def load(target: str, callers: int) -> AsyncGenerator[list[int]]:
    """Callers that call without a pause; the list holds the calls that each has made."""
    stop = False
    made = [0] * callers

    async def work(caller: int) -> None:
        async with Client(target) as client:
            for number in itertools.count():
                if stop:
                    return
                await client.score([" x"] * 4, MODE, query=f"caller {caller}, call {number % 7}")
                made[caller] += 1

    async with asyncio.TaskGroup() as tasks:
        for caller in range(callers):
            tasks.create_task(work(caller))
        yield made
        stop = True


async def test_a_server_is_drained_without_a_failed_call(fleet: Fleet) -> None:
    name, *others = fleet.running()
    server = fleet.servers[name]
    async with load(fleet.target, callers=4) as made:
        await asyncio.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 30) == 0
        calls = sum(made)
        while sum(made) < calls + 20:
            await asyncio.sleep(0.05)
    assert min(made) > 0
    assert set((await fleet.owners()).values()) == set(others)
