"""Several client processes that call one server together."""

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from stemserve.service.bench.client_process import CallRecord, Calls, Done, serve_calls

LEAD_S = 0.05  # from handing out calls to the first of them
HANDED_BYTES_PER_S = 50e6  # and what it takes to hand them out, at least
READY_S = 60.0
STOP_S = 5.0


class ClientFailed(Exception):
    """A client process ended, or cannot reach the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The records are in the order of the requests."""

    records: list[CallRecord]
    busiest_client: float  # share of its time for which that process used a core

    @property
    def failed(self) -> int:
        return sum(bool(record.error) for record in self.records)

    @property
    def seconds(self) -> float:
        """From the moment that the first call was due to the last message."""
        return max(record.done for record in self.records) - self.records[0].due


class ClientPool:
    def __init__(self, server: str, processes: int, *, ready_s: float = READY_S) -> None:
        """Raises ClientFailed."""
        context = multiprocessing.get_context("spawn")
        self._clients: list[tuple[BaseProcess, Connection]] = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_calls, args=(server, theirs), daemon=True)
            process.start()
            theirs.close()
            self._clients.append((process, ours))
        for _, connection in self._clients:
            if not connection.poll(ready_s):
                self.close()
                raise ClientFailed(f"a client process does not reach {server}")
            self._receive(connection)

    def make(
        self,
        method: str,
        requests: Sequence[bytes],
        *,
        after: Sequence[float] | None = None,
        timeout_s: float = 120.0,
    ) -> Made:
        """Send each request `after` seconds from the start (all at once without), in turn over the
        processes, and wait for all answers."""
        after = after or [0.0] * len(requests)
        shares = [slice(first, None, len(self._clients)) for first in range(len(self._clients))]
        lead_s = LEAD_S + sum(map(len, requests)) / HANDED_BYTES_PER_S
        start = time.perf_counter() + lead_s
        busy: list[Connection] = []
        for (_, connection), share in zip(self._clients, shares, strict=True):
            if requests[share]:
                connection.send(
                    Calls(
                        method=method,
                        requests=requests[share],
                        due=[start + seconds for seconds in after[share]],
                        timeout_s=timeout_s,
                    )
                )
                busy.append(connection)
        records: list[Any] = [None] * len(requests)
        shares_used: list[float] = []
        for connection, share in zip(busy, shares, strict=False):
            done = self._receive(connection)
            records[share] = done.records
            shares_used.append(done.cpu_seconds / done.seconds)
        return Made(records=records, busiest_client=max(shares_used))

    def _receive(self, connection: Connection) -> Done:
        try:
            received: Done = connection.recv()
        except EOFError as error:
            raise ClientFailed("a client process ended") from error
        return received

    def close(self) -> None:
        for process, connection in self._clients:
            connection.close()
            process.join(STOP_S)
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
