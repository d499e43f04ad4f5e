"""Hold the tokens of one generation until its reader takes them, up to a bound.

A message costs the front end far more than a token, so under load tokens wait a little for others.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from stemserve.service.errors import SlowReader
from stemserve.service.limits import Limits
from stemserve.service.request import GenerateChunk, SampleTokens
from stemserve.service.stream_pace import StreamPace
from stemserve.service.workers.message_clock import MessageClock

MAX_UNREAD_TOKENS = Limits().max_unread_tokens


class TokenStream:
    """For one writer and one reader on one event loop.

    The reader gets all that has come as one chunk, in order. It is woken at once by the first
    tokens, by the last ones of a sample and by the end; otherwise by `pace.least_tokens` of a
    sample or, without them, when `clock` says; without a clock by all. A token takes some 100
    bytes here.
    """

    def __init__(
        self,
        *,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        pace: StreamPace | None = None,
        clock: MessageClock | None = None,
        on_overflow: Callable[[SlowReader], object] | None = None,
    ) -> None:
        """`on_overflow` hears once that a reader is too far behind; it may be waiting for its
        client to take what it has, and not in `take`."""
        self._max_unread_tokens = max_unread_tokens
        self._pace = pace or StreamPace()
        self._clock = clock
        self._on_overflow = on_overflow
        self._unread: list[SampleTokens] = []
        self._num_tokens = 0  # in it
        self._tokens_of = Counter[int]()  # in it, by sample, where the pace counts them
        self._last: GenerateChunk | None = None  # the newest chunk that was not taken
        self._error: Exception | None = None
        self._due = asyncio.Event()  # what is there may be taken
        self._has_begun = False  # something was taken
        self._reader_waits = False

    def put(self, chunk: GenerateChunk) -> None:
        if self._error is not None:
            return
        completes = self._pace.completes(chunk)
        num_tokens = self._num_tokens + chunk.num_tokens
        if num_tokens > self._max_unread_tokens and self._unread and self._due.is_set():
            self._overflow()
            return
        if self._last is not None:
            self._count_joined()
        self._unread += chunk.news
        self._num_tokens = num_tokens
        self._last = chunk
        if not self._due.is_set():
            if completes or self._is_urgent(chunk):
                self._due.set()
            elif not self._pace.least_tokens and self._clock is not None:
                self._clock.wait(self._release)

    def fail(self, error: Exception) -> None:
        """`take` raises this once all tokens before it are taken."""
        self._error = self._error or error
        self._due.set()

    async def take(self) -> GenerateChunk:
        self._reader_waits = True
        try:
            await self._due.wait()
        finally:
            self._reader_waits = False
        last, self._last = self._last, None
        if last is None:
            assert self._error is not None
            raise self._error
        news, self._unread, self._num_tokens = self._unread, [], 0
        self._tokens_of.clear()
        self._has_begun = True
        if self._error is None:
            self._due.clear()
        return last if len(news) == len(last.news) else last._replace(news=news)

    def _is_urgent(self, chunk: GenerateChunk) -> bool:
        if chunk.usage is not None or not self._has_begun:
            return True
        if self._clock is None and not self._pace.least_tokens:
            return True
        if self._num_tokens > self._max_unread_tokens:
            return True
        if any(tokens.finish for tokens in chunk.news):
            return True
        return self._pace.least_tokens > 0 and self._has_enough(chunk)

    def _has_enough(self, chunk: GenerateChunk) -> bool:
        most = 0
        for tokens in chunk.news:
            self._tokens_of[tokens.sample] += len(tokens.token_ids)
            most = max(most, self._tokens_of[tokens.sample])
        return most >= self._pace.least_tokens

    def _release(self) -> None:
        """Called by the clock too, perhaps when all has been taken."""
        if self._last is not None:
            self._due.set()

    def _count_joined(self) -> None:
        if self._reader_waits:
            self._pace.joined_by_pace += 1
        else:
            self._pace.joined_behind += 1

    def _overflow(self) -> None:
        error = SlowReader(
            f"{self._num_tokens} tokens wait for the client to read them, and "
            f"max_unread_tokens is {self._max_unread_tokens}; read faster or ask for less"
        )
        self.fail(error)
        if self._on_overflow is not None:
            self._on_overflow(error)
