"""Keep one worker attached to the step loop: start it, wait for it, replace it when it is lost."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import grpc

from stemserve.proto.v1 import worker_pb2
from stemserve.service.request import WorkerFacts
from stemserve.service.serving.health import Health
from stemserve.service.workers.step_commands import Attach, Inbox, Lost, Result
from stemserve.service.workers.threaded_engine import PREDICT_TIMEOUT_S, ThreadedEngine
from stemserve.service.workers.worker_client import WorkerClient, WorkerUnreachable

STOP_GRACE_S = 5.0
THREADS = 2  # one may wait for a worker to be ready while the other closes its connection

_log = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerHost(Protocol):
    """Where a worker runs: a child process, or somewhere else."""

    address: str
    credentials: grpc.ChannelCredentials | None  # None: plaintext

    def ended(self) -> str | None:
        """How the worker ended, or None if it runs or nobody here can know."""
        ...

    def stop(self, *, grace_s: float) -> None: ...

    def kill(self) -> None: ...


class WorkerMetrics(Protocol):
    def worker_up(self, up: bool) -> None: ...

    def worker_restarted(self, reason: str) -> None: ...

    def model_loaded(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    startup_timeout_s: float = 600.0
    first_delay_s: float = 0.25  # doubled by each loss in a row
    max_delay_s: float = 2.0  # callers wait: a worker that ends at once is tried often enough
    settled_after_s: float = 10.0  # a worker that served this long starts the count anew
    max_failed_starts: int = 5  # in a row; then the service gives up


class WorkerSupervisor:
    """Runs on the RPC loop; what blocks goes to threads."""

    def __init__(
        self,
        launch: Callable[[], WorkerHost],
        *,
        inbox: Inbox,
        engine: ThreadedEngine,
        health: Health,
        metrics: WorkerMetrics,
        policy: RestartPolicy,
    ) -> None:
        self._launch = launch
        self._inbox = inbox
        self._engine = engine
        self._health = health
        self._metrics = metrics
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, "worker-supervisor")
        self._losses: asyncio.Queue[str] = asyncio.Queue()
        self._generation = 0
        self._ready_at = 0.0
        self._stopping = False
        self._host: WorkerHost | None = None
        self._client: WorkerClient | None = None

    def worker_lost(self, generation: int, reason: str) -> None:
        """Called by a thread at the step loop's work, before it fails the worker's jobs."""
        self._loop.call_soon_threadsafe(self._note_loss, generation, reason)

    async def start(self) -> WorkerFacts:
        """Launch a worker and attach it. Raises WorkerUnreachable; then nothing is left running."""
        self._generation += 1
        generation = self._generation
        launched_at = time.monotonic()
        try:
            host = self._launch()
        except OSError as error:
            raise WorkerUnreachable(f"the worker cannot be started: {error}") from error
        client = WorkerClient(host.address, host.credentials)
        self._host, self._client = host, client
        try:
            facts = await self._aside(
                partial(
                    client.describe,
                    timeout_s=self._policy.startup_timeout_s,
                    give_up=lambda: "the server stops" if self._stopping else host.ended(),
                )
            )
        except BaseException:
            await self._release()
            raise
        self._inbox.put(Attach(generation=generation, worker=client, facts=facts))
        client.open(
            on_result=partial(self._put_result, generation),
            on_lost=partial(self._put_lost, generation),
        )
        self._ready_at = time.monotonic()
        self._metrics.model_loaded(self._ready_at - launched_at)
        self._engine.admit(facts, partial(client.predict, timeout_s=PREDICT_TIMEOUT_S))
        self._health.set_worker_ready(True)
        self._metrics.worker_up(True)
        _log.info("worker %s is ready: %s", client.address, facts)
        return facts

    async def supervise(self) -> None:
        """Replace lost workers until cancelled. Raises WorkerUnreachable when it gives up."""
        losses = 0
        while True:
            reason = await self._losses.get()
            settled = time.monotonic() - self._ready_at > self._policy.settled_after_s
            losses = 1 if settled else losses + 1
            _log.error("lost the worker (%s); starting another one", reason)
            self.kill()  # it owes nothing any more, and may hang
            await self._release()
            await self._restart(losses)

    async def close(self) -> None:
        """Stop the worker; nothing is attached afterwards."""
        self._stopping = True
        await self._release()
        self._threads.shutdown(wait=False)

    def kill(self) -> None:
        """End the worker's process at once."""
        if self._host is not None:
            self._host.kill()

    async def _restart(self, losses: int) -> None:
        failed_starts = 0
        while True:
            exponent = min(losses + failed_starts - 1, 30)
            await asyncio.sleep(
                min(self._policy.first_delay_s * 2**exponent, self._policy.max_delay_s)
            )
            self._metrics.worker_restarted("exit")
            try:
                await self.start()
                return
            except WorkerUnreachable as error:
                failed_starts += 1
                _log.error("worker start %d in a row failed: %s", failed_starts, error)
                if failed_starts >= self._policy.max_failed_starts:
                    raise WorkerUnreachable(
                        f"gave up after {failed_starts} failed starts: {error}"
                    ) from error

    async def _release(self) -> None:
        """May be cancelled, and then called again."""
        if self._client is not None:
            await self._aside(self._client.close)
            self._client = None
        if self._host is not None:
            await self._aside(partial(self._host.stop, grace_s=STOP_GRACE_S))
            self._host = None

    def _aside(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """In a thread that no other work can keep."""
        return self._loop.run_in_executor(self._threads, work)

    def _note_loss(self, generation: int, reason: str) -> None:
        if generation != self._generation or self._stopping:
            return
        self._health.set_worker_ready(False)
        self._metrics.worker_up(False)
        self._engine.suspend(f"the worker was lost ({reason}) and is being restarted; retry")
        self._losses.put_nowait(reason)

    def _put_result(self, generation: int, result: worker_pb2.StepResult) -> None:
        self._inbox.leave(Result(generation=generation, result=result))
        self._inbox.work(wait=True)

    def _put_lost(self, generation: int, reason: str) -> None:
        self._inbox.put(Lost(generation=generation, reason=reason))
