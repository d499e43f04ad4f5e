"""A process that makes calls at given moments and notes when each message came.

Requests come serialised and answers are kept as bytes, so that the client takes as little as it can
of the time that it measures. Moments are of time.perf_counter, which all processes of a machine
share.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from stemserve.service.client.channel import OPTIONS

SCORE = "/stemserve.v1.Inference/Score"
GENERATE = "/stemserve.v1.Inference/Generate"
# Each client its own connection, also to a server that others call from here.
_CHANNEL = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    method: str  # SCORE or GENERATE
    requests: Sequence[bytes]
    due: Sequence[float]  # ascending moments, one a request
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class CallRecord:
    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list[float])  # one a message
    messages: list[bytes] = field(default_factory=list[bytes])
    error: str = ""  # status code and message of a call that failed

    @property
    def done(self) -> float:
        return self.arrivals[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    records: list[CallRecord]
    cpu_seconds: float  # of the process while it made the calls
    seconds: float


def serve_calls(server: str, connection: Connection) -> None:
    """Make the calls that come through the connection, until it is closed."""
    with contextlib.suppress(EOFError):
        uvloop.run(_serve(server, connection))


async def _serve(server: str, connection: Connection) -> None:
    async with grpc.aio.insecure_channel(server, _CHANNEL) as channel:
        await channel.channel_ready()
        connection.send("ready")
        while True:
            calls: Calls = await asyncio.to_thread(connection.recv)
            gc.collect()
            gc.disable()
            started, cpu = time.perf_counter(), time.process_time()
            records = await _make(channel, calls)
            gc.enable()
            connection.send(
                Done(
                    records=records,
                    cpu_seconds=time.process_time() - cpu,
                    seconds=time.perf_counter() - started,
                )
            )


async def _make(channel: grpc.aio.Channel, calls: Calls) -> list[CallRecord]:
    records = [CallRecord(due=due) for due in calls.due]
    call = _generate(channel) if calls.method == GENERATE else _score(channel)
    async with asyncio.TaskGroup() as running:
        for record, request in zip(records, calls.requests, strict=True):
            while (wait := record.due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            running.create_task(_note(call, record, request, calls.timeout_s))
    return records


async def _note(call: Any, record: CallRecord, request: bytes, timeout_s: float) -> None:
    record.sent = time.perf_counter()
    try:
        await call(record, request, timeout_s)
    except grpc.aio.AioRpcError as error:
        record.error = f"{error.code().name}: {error.details()}"


def _score(channel: grpc.aio.Channel) -> Any:
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SCORE)

    async def call(record: CallRecord, request: bytes, timeout_s: float) -> None:
        answer: bytes = await method(request, timeout=timeout_s)
        record.arrivals.append(time.perf_counter())
        record.messages.append(answer)

    return call


def _generate(channel: grpc.aio.Channel) -> Any:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)

    async def call(record: CallRecord, request: bytes, timeout_s: float) -> None:
        async for message in method(request, timeout=timeout_s):
            record.arrivals.append(time.perf_counter())
            record.messages.append(message)

    return call
