"""Compilations of all tenants for a few threads: each tenant in its turn, and none fills them."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from stemserve.service.errors import QueueFull
from stemserve.service.tenant_shares import TenantShares

MOST_WAITING = 32  # that run or wait
RETRY_S = 1.0

Made = TypeVar("Made")


@dataclass(slots=True, kw_only=True, eq=False)
class _Work:
    tenant: str
    run: Callable[[], Any]
    done: asyncio.Future[Any]


class CompileQueue:
    """Of one event loop. A tenant that brings much waits behind itself: whoever comes next waits
    for one work of each tenant that is there."""

    def __init__(
        self,
        executor: ThreadPoolExecutor,
        *,
        threads: int = 1,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`threads` of the executor, which do nothing else; `weights` of the tenants that have a
        part of the places to themselves."""
        self._executor = executor
        self._threads = threads
        self._shares = TenantShares(MOST_WAITING, weights or {})
        self._taken = Counter[str]()  # places, by tenant
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()  # the next tenant first
        self._running: dict[asyncio.Future[Any], _Work] = {}

    def submit(self, tenant: str, run: Callable[[], Made]) -> asyncio.Future[Made]:
        """Its result; once somebody has given it up, it still counts until a thread has let go of
        it. Raises QueueFull."""
        if not self._shares.fits(self._taken, tenant, 1):
            raise QueueFull("too many constraints are being compiled", retry_after_s=RETRY_S)
        work = _Work(tenant=tenant, run=run, done=asyncio.get_running_loop().create_future())
        self._taken[tenant] += 1
        self._waiting.setdefault(tenant, deque()).append(work)
        self._start()
        return work.done

    def withdraw(self, done: asyncio.Future[Any]) -> bool:
        """Forget a work that no thread has begun; False: one has, or it is done."""
        for tenant, works in self._waiting.items():
            for work in works:
                if work.done is done:
                    works.remove(work)
                    if not works:
                        del self._waiting[tenant]
                    self._leave(work)
                    done.cancel()
                    return True
        return False

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._threads:
            tenant, works = self._waiting.popitem(last=False)
            work = works.popleft()
            if works:
                self._waiting[tenant] = works  # behind the others
            try:
                running = asyncio.wrap_future(self._executor.submit(work.run))
            except RuntimeError:  # the executor was shut down: the server ends
                self._leave(work)
                work.done.cancel()
                continue
            self._running[running] = work
            running.add_done_callback(self._end)

    def _end(self, running: asyncio.Future[Any]) -> None:
        work = self._running.pop(running)
        self._leave(work)
        if not work.done.done():
            _pass_on(running, work.done)
        self._start()

    def _leave(self, work: _Work) -> None:
        self._taken[work.tenant] -= 1
        if not self._taken[work.tenant]:
            del self._taken[work.tenant]


def _pass_on(source: asyncio.Future[Any], target: asyncio.Future[Any]) -> None:
    if source.cancelled():
        target.cancel()
    elif (error := source.exception()) is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())
