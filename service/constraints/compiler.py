"""Compile constraints beside the event loop, each within a time limit, and keep those that were."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from stemserve.service.constraints.constraint import Constraint
from stemserve.service.constraints.grammar import Source, Vocabulary, compile_source
from stemserve.service.errors import InvalidRequest, QueueFull, RequestError
from stemserve.service.metrics import Metrics
from stemserve.service.text.tokenizer import Tokenizer

KEPT = 64
KEPT_BYTES = 512 << 20  # of all of them, but for the last one used
MOST_WAITING = 32  # compilations that run or wait
RETRY_S = 1.0

Made = TypeVar("Made")


class ConstraintCompiler:
    def __init__(
        self,
        tokenizer: Tokenizer,
        executor: ThreadPoolExecutor,
        metrics: Metrics,
        *,
        vocab_size: int,
        max_compile_ms: int,
    ) -> None:
        """`vocab_size`: width of the model's logits. The executor's threads compile only."""
        self._tokenizer = tokenizer
        self._executor = executor
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._max_s = max_compile_ms / 1000
        self._kept: OrderedDict[Source, Constraint] = OrderedDict()  # the last used behind
        self._running: dict[Source, asyncio.Future[Constraint]] = {}
        self._others: set[asyncio.Future[Any]] = set()  # that run, and are kept elsewhere

    async def compiled(
        self, source: Source, build: Callable[[], Constraint] | None = None
    ) -> Constraint:
        """`build`, in a thread, makes what is no constraint on text. Raises InvalidRequest, or
        QueueFull where too many are compiled."""
        kept = self._kept.get(source)
        self._metrics.constraint_looked_up(source.kind, found=kept is not None)
        if kept is not None:
            self._kept.move_to_end(source)
            return kept
        running = self._compilation(source, build or partial(self._compile_text, source))
        # After its time the thread goes on until its fuel is used up; what it makes is kept.
        return await self._in_time(source.kind, asyncio.shield(running))

    async def made(self, kind: str, build: Callable[[], Made]) -> Made:
        """What `build` makes in a thread, for somebody else to keep. Raises as `compiled`.

        Returns, even when it is cancelled, once the thread has let go of what it works on: what
        that takes is the caller's to count.
        """
        submitted = self._submitted(kind, build)
        running = asyncio.wrap_future(submitted)
        self._others.add(running)
        running.add_done_callback(self._others.discard)
        try:
            return await self._in_time(kind, asyncio.shield(running))
        except BaseException:
            if not submitted.cancel():
                await asyncio.wait([running])
            raise

    async def _in_time(self, kind: str, running: asyncio.Future[Made]) -> Made:
        try:
            return await asyncio.wait_for(running, self._max_s)
        except TimeoutError:
            raise InvalidRequest(
                kind, f"takes longer than max_compile_ms ({self._max_s * 1000:g} ms)"
            ) from None

    def _compilation(
        self, source: Source, build: Callable[[], Constraint]
    ) -> asyncio.Future[Constraint]:
        """Of several that ask for the same, one compiles."""
        running = self._running.get(source)
        if running is not None:
            return running
        running = asyncio.wrap_future(self._submitted(source.kind, build))
        self._running[source] = running
        running.add_done_callback(lambda done: self._keep(source, done))
        return running

    def _submitted(self, kind: str, build: Callable[[], Made]) -> Future[Made]:
        if len(self._running) + len(self._others) >= MOST_WAITING:
            raise QueueFull("too many constraints are being compiled", retry_after_s=RETRY_S)
        return self._executor.submit(partial(self._compile, kind, build))

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

    def _keep(self, source: Source, done: asyncio.Future[Constraint]) -> None:
        del self._running[source]
        if done.cancelled() or isinstance(done.exception(), RequestError):
            return  # whoever still waits is told
        if done.exception() is None:
            self._kept[source] = done.result()
            while len(self._kept) > 1 and not self._fits():
                self._kept.popitem(last=False)

    def _fits(self) -> bool:
        total = sum(constraint.num_bytes for constraint in self._kept.values())
        return len(self._kept) <= KEPT and total <= KEPT_BYTES

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        """Some 100 ms; made for the first constraint. Raises InvalidRequest."""
        return Vocabulary(self._tokenizer, self._vocab_size)
