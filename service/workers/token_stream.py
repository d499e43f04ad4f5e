"""Hold the tokens of one generation until its reader takes them, up to a bound."""

import asyncio

from stemserve.service.errors import QueueFull
from stemserve.service.request import GenerateChunk, SampleToken

# Some 200 bytes a token. A reader that is this far behind does not read at all.
MAX_UNREAD_TOKENS = 65_536


class TokenStream:
    """For one writer and one reader on one event loop.

    A reader that is behind gets all that has come as one chunk, in order.
    """

    def __init__(self, *, max_unread_tokens: int = MAX_UNREAD_TOKENS) -> None:
        self._max_unread_tokens = max_unread_tokens
        self._tokens: list[SampleToken] = []
        self._last: GenerateChunk | None = None  # the newest chunk that was not taken
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, chunk: GenerateChunk) -> None:
        if len(self._tokens) + len(chunk.tokens) > self._max_unread_tokens:
            self.fail(
                QueueFull(
                    f"{len(self._tokens)} tokens wait to be read; read faster or ask for fewer",
                    retry_after_s=1.0,
                )
            )
        if self._error is None:
            self._tokens += chunk.tokens
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
        tokens, self._tokens = self._tokens, []
        if self._error is None:
            self._news.clear()
        if len(tokens) == len(last.tokens):
            return last
        return GenerateChunk(
            request_id=last.request_id,
            tokens=tuple(tokens),
            usage=last.usage,
            timing=last.timing,
        )
