"""A network between a client and a server that can vanish without a word."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Self


class Relay:
    def __init__(self, port: int) -> None:
        self._port = port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._pumps: list[asyncio.Task[None]] = []
        self.target = ""

    @classmethod
    @asynccontextmanager
    async def to(cls, target: str) -> AsyncGenerator[Self]:
        relay = cls(int(target.rpartition(":")[2]))
        server = await asyncio.start_server(relay._join, "127.0.0.1", 0)
        relay.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield relay
        finally:
            server.close()
            for pump in relay._pumps:
                pump.cancel()
            await asyncio.gather(*relay._pumps, return_exceptions=True)

    def vanish(self) -> None:
        """Nothing that is sent arrives any more; the connections stay open."""
        self._flowing.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("localhost", self._port)
        self._pumps += [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while blob := await reader.read(65_536):
                await self._flowing.wait()
                writer.write(blob)
        finally:
            writer.close()
