"""Hold what is read of one Score job until its reader takes it."""

import asyncio
from dataclasses import replace

import numpy as np

from stemserve.service.request import ScorePart, ScoreResult


class PartStream:
    """For one writer and one reader on one event loop.

    What waits is bounded by the job: the numbers are in the job's own arrays, and no unit is told
    of twice. A reader that is behind gets all that has come as one part.
    """

    def __init__(self) -> None:
        self._parts: list[ScorePart] = []  # not taken
        self._last: ScoreResult | Exception | None = None
        self._news = asyncio.Event()

    def put(self, part: ScorePart) -> None:
        self._parts.append(part)
        self._news.set()

    def finish(self, result: ScoreResult) -> None:
        """`take` returns it once all parts before it are taken."""
        self._last = self._last or result
        self._news.set()

    def fail(self, error: Exception) -> None:
        """`take` raises it once all parts before it are taken."""
        self._last = self._last or error
        self._news.set()

    async def take(self) -> ScorePart | ScoreResult:
        await self._news.wait()
        parts, self._parts = self._parts, []
        if parts:
            if self._last is None:
                self._news.clear()
            return _joined(parts)
        if isinstance(self._last, ScoreResult):
            return self._last
        assert self._last is not None
        raise self._last


def _joined(parts: list[ScorePart]) -> ScorePart:
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[-1],
        units=np.sort(np.concatenate([part.units for part in parts])),
        failed_units=np.sort(np.concatenate([part.failed_units for part in parts])),
    )
