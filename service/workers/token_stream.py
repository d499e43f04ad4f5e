"""Hold the tokens of one generation until its reader takes them, up to a bound."""

import asyncio
from collections.abc import Callable

from stemserve.service.errors import SlowReader
from stemserve.service.limits import Limits
from stemserve.service.request import GenerateChunk, SampleTokens

MAX_UNREAD_TOKENS = Limits().max_unread_tokens


class TokenStream:
    """For one writer and one reader on one event loop.

    A reader that is behind gets all that has come as one chunk, in order. A token takes some 100
    bytes here.
    """

    def __init__(
        self,
        *,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        on_overflow: Callable[[SlowReader], object] | None = None,
    ) -> None:
        """`on_overflow` hears once that a reader is too far behind; it may be waiting for its
        client to take what it has, and not in `take`."""
        self._max_unread_tokens = max_unread_tokens
        self._on_overflow = on_overflow
        self._unread: list[SampleTokens] = []
        self._num_tokens = 0  # in it
        self._last: GenerateChunk | None = None  # the newest chunk that was not taken
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, chunk: GenerateChunk) -> None:
        if self._error is not None:
            return
        num_tokens = self._num_tokens + chunk.num_tokens
        if self._unread and num_tokens > self._max_unread_tokens:
            error = SlowReader(
                f"{self._num_tokens} tokens wait for the client to read them, and "
                f"max_unread_tokens is {self._max_unread_tokens}; read faster or ask for less"
            )
            self.fail(error)
            if self._on_overflow is not None:
                self._on_overflow(error)
            return
        self._unread += chunk.news
        self._num_tokens = num_tokens
        self._last = chunk
        self._news.set()

    def fail(self, error: Exception) -> None:
        """`take` raises this once all tokens before it are taken."""
        self._error = self._error or error
        self._news.set()

    async def take(self) -> GenerateChunk:
        await self._news.wait()
        last, self._last = self._last, None
        if last is None:
            assert self._error is not None
            raise self._error
        news, self._unread, self._num_tokens = self._unread, [], 0
        if self._error is None:
            self._news.clear()
        return last if len(news) == len(last.news) else last._replace(news=news)
