"""Compile constraints beside the event loop, each within a time limit, and keep those that were."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import TypeVar

from stemserve.service.constraints.compile_queue import CompileQueue
from stemserve.service.constraints.constraint import Constraint
from stemserve.service.constraints.grammar import Source, Vocabulary, compile_source
from stemserve.service.constraints.kept import KeptConstraints
from stemserve.service.errors import InvalidRequest, RequestError
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.text.tokenizer import Tokenizer

Made = TypeVar("Made")


class ConstraintCompiler:
    def __init__(
        self,
        tokenizer: Tokenizer,
        queue: CompileQueue,
        metrics: Metrics,
        *,
        vocab_size: int,
        max_compile_ms: int,
    ) -> None:
        """`vocab_size`: width of the model's logits."""
        self._tokenizer = tokenizer
        self._queue = queue
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._max_s = max_compile_ms / 1000
        self._kept = KeptConstraints()
        self._running: dict[tuple[str, Source], asyncio.Future[Constraint]] = {}

    async def prepare(self) -> None:
        """Make what the library knows of the vocabulary, for all constraints on text to come: up
        to a second and a half, in which nothing else of the process runs. To be done before there
        are calls. A model that cannot have such constraints says so to those who ask for one."""
        with suppress(InvalidRequest):
            await self._queue.submit("", lambda: self._vocabulary)

    async def compiled(
        self, tenant: str, source: Source, build: Callable[[], Constraint] | None = None
    ) -> Constraint:
        """`build`, in a thread, makes what is no constraint on text. Raises InvalidRequest, or
        QueueFull where too many are compiled. What one tenant has is made anew for another."""
        kept = self._kept.get(tenant, source)
        self._metrics.constraint_looked_up(source.kind, found=kept is not None)
        if kept is not None:
            return kept
        build = build or partial(self._compile_text, source)
        running = self._compilation(tenant, source, build)
        # After its time the thread goes on until its fuel is used up; what it makes is kept.
        return await self._in_time(source.kind, asyncio.shield(running))

    async def made(self, tenant: str, kind: str, build: Callable[[], Made]) -> Made:
        """What `build` makes in a thread, for somebody else to keep. Raises as `compiled`.

        Returns, even when it is cancelled, once the thread has let go of what it works on: what
        that takes is the caller's to count.
        """
        running = self._queue.submit(tenant, partial(self._compile, kind, build))
        try:
            return await self._in_time(kind, asyncio.shield(running))
        except BaseException:
            if not self._queue.withdraw(running):
                await asyncio.wait([running])
            raise

    async def _in_time(self, kind: str, running: asyncio.Future[Made]) -> Made:
        try:
            async with asyncio.timeout(self._max_s):
                return await running
        except TimeoutError:
            raise InvalidRequest(
                kind, f"takes longer than max_compile_ms ({self._max_s * 1000:g} ms)"
            ) from None

    def _compilation(
        self, tenant: str, source: Source, build: Callable[[], Constraint]
    ) -> asyncio.Future[Constraint]:
        """Of several calls of a tenant that ask for the same, one compiles."""
        key = (tenant, source)
        running = self._running.get(key)
        if running is None:
            running = self._queue.submit(tenant, partial(self._compile, source.kind, build))
            self._running[key] = running
            running.add_done_callback(partial(self._keep, key))
        return running

    def _compile_text(self, source: Source) -> Constraint:
        return compile_source(source, self._vocabulary)

    def _compile(self, kind: str, build: Callable[[], Made]) -> Made:
        """In a thread of the executor."""
        started, outcome = time.perf_counter(), "refused"
        try:
            made = build()
            outcome = "compiled"
            return made
        finally:
            seconds = time.perf_counter() - started
            self._metrics.constraint_compiled(kind, outcome, seconds)

    def _keep(self, key: tuple[str, Source], done: asyncio.Future[Constraint]) -> None:
        del self._running[key]
        if done.cancelled() or isinstance(done.exception(), RequestError):
            return  # whoever still waits is told
        if done.exception() is None:
            self._kept.put(*key, done.result())

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        """Raises InvalidRequest."""
        return Vocabulary(self._tokenizer, self._vocab_size)
