"""What can happen to a server and its clients at any moment."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.server_process import RunningServer, environment
from stemserve.service.client import Client, ClientError

# A process of its own that makes a long call, to be killed in the middle of it.
LONG_CALLER = """
import asyncio, sys
from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client

async def main() -> None:
    async with Client(sys.argv[1]) as client:
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Context(text="Once upon a time"),
            max_new_tokens=2000, ignore_eos=True, n=2,
        )
        async for _ in client.generate(request):
            print("token", flush=True)

asyncio.run(main())
"""

Fault = Callable[[RunningServer, random.Random], Awaitable[None]]


async def kill_worker(server: RunningServer, rng: random.Random) -> None:
    for pid in server.worker_pids:
        os.kill(pid, signal.SIGKILL)


async def hang_worker(server: RunningServer, rng: random.Random) -> None:
    for pid in server.worker_pids:
        os.kill(pid, signal.SIGSTOP)


async def cancel_call(server: RunningServer, rng: random.Random) -> None:
    """Of a generation, or in the middle of a call with 2,000 items."""
    async with Client(server.address) as client:
        call = asyncio.create_task(_long_call(client, rng))
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def pass_deadline(server: RunningServer, rng: random.Random) -> None:
    async with Client(server.address, timeout_s=rng.uniform(0.01, 0.5)) as client:
        try:
            await _long_call(client, rng)
        except ClientError:
            return


async def disconnect(server: RunningServer, rng: random.Random) -> None:
    client = Client(server.address)
    call = asyncio.create_task(_long_call(client, rng))
    await asyncio.sleep(rng.uniform(0.0, 0.5))
    await client.close()
    await asyncio.gather(call, return_exceptions=True)


async def kill_client(server: RunningServer, rng: random.Random) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_CALLER, server.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    stdout = process.stdout
    if stdout is not None:
        await asyncio.to_thread(stdout.readline)  # it has its first token, or has failed
    process.kill()
    await asyncio.to_thread(process.wait)


async def _long_call(client: Client, rng: random.Random) -> None:
    if rng.random() < 0.5:
        items = [f" item number {n} of many" for n in range(2_000)]
        await client.score(items, inference_pb2.LogLikelihood(), query="A long list:")
        return
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text="Once upon a time"),
        max_new_tokens=500,
        ignore_eos=True,
        n=rng.choice((1, 4)),
    )
    async for _ in client.generate(request):
        pass


# With how often each comes.
FAULTS: Mapping[Fault, int] = {
    kill_worker: 15,
    hang_worker: 5,
    cancel_call: 30,
    pass_deadline: 20,
    disconnect: 20,
    kill_client: 10,
}
OF_WORKERS = (kill_worker, hang_worker)
