"""The server that is measured, and what a measurement needs beside it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from stemserve.proto.v1 import info_pb2, prefixes_pb2
from stemserve.service.bench.client_pool import ClientPool
from stemserve.service.bench.scrape import Reading, scrape
from stemserve.service.bench.tokens import TokenSource
from stemserve.service.client import Client, token_blob
from stemserve.service.request import Int32

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Rounds of a row; those of warm-up are checked and not counted."""

    warm_up: int
    score: int
    decode: int


FULL = Repeats(warm_up=2, score=5, decode=3)
QUICK = Repeats(warm_up=1, score=4, decode=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    address: str
    metrics_url: str | None  # without it, what only the server knows is left out
    pool: ClientPool
    tokens: TokenSource
    repeats: Repeats

    def metrics(self) -> Reading:
        return scrape(self.metrics_url)

    def register(self, prefixes: Int32) -> tuple[str, ...]:
        """Registered and computed; their ids."""
        return ask(self.address, lambda client: _register(client, prefixes))

    def release(self, prefix_ids: tuple[str, ...]) -> None:
        ask(self.address, lambda client: _release(client, prefix_ids))


def describe(address: str) -> info_pb2.GetModelResponse:
    """Raises ClientError where no server answers."""
    return ask(address, lambda client: client.model())


def ask(address: str, question: Callable[[Client], Awaitable[Answer]]) -> Answer:
    async def answer() -> Answer:
        async with Client(address, timeout_s=120.0) as client:
            return await question(client)

    return asyncio.run(answer())


async def _register(client: Client, prefixes: Int32) -> tuple[str, ...]:
    made = [
        await client.register(prefixes_pb2.RegisterRequest(tokens=token_blob(prefix), warm=True))
        for prefix in prefixes
    ]
    return tuple(prefix.prefix_id for prefix in made)


async def _release(client: Client, prefix_ids: tuple[str, ...]) -> None:
    for prefix_id in prefix_ids:
        await client.release_prefix(prefix_id)
