"""The calls that wait for news of their jobs, and who of them gets which."""

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from stemserve.service.errors import EngineFault
from stemserve.service.request import Event, GenerateChunk, JobFailed, ScorePart, ScoreResult
from stemserve.service.workers.part_stream import PartStream
from stemserve.service.workers.token_stream import TokenStream

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RunningCalls:
    """By the ids of their jobs; for the thread of the RPC loop."""

    def __init__(self, *, note_lost: Callable[[], object]) -> None:
        """`note_lost` hears of each call that ends because it could not take its news."""
        self._note_lost = note_lost
        self.scores: dict[str, asyncio.Future[ScoreResult]] = {}
        self.part_streams: dict[str, PartStream] = {}
        self.streams: dict[str, TokenStream] = {}

    def __len__(self) -> int:
        return len(self.scores) + len(self.part_streams) + len(self.streams)

    @contextmanager
    def registered(self, request_id: str, kind: dict[str, T], call: T) -> Generator[None]:
        """`kind`: one of the three. Raises EngineFault where a job has that id."""
        if any(request_id in known for known in (self.scores, self.part_streams, self.streams)):
            raise EngineFault(f"two jobs are called {request_id!r}")
        kind[request_id] = call
        try:
            yield
        finally:
            del kind[request_id]

    def dispatch(self, events: list[Event]) -> None:
        """A call that cannot take its news ends, and harms no other."""
        for event in events:
            try:
                self._hand_over(event)
            except Exception as error:
                self._lose(event, error)

    def _hand_over(self, event: Event) -> None:
        match event:
            case ScoreResult(request_id=request_id):
                future = self.scores.get(request_id)
                if future is not None and not future.done():
                    future.set_result(event)
                if (parts := self.part_streams.get(request_id)) is not None:
                    parts.finish(event)
            case ScorePart(request_id=request_id):
                if (parts := self.part_streams.get(request_id)) is not None:
                    parts.put(event)
            case GenerateChunk(request_id=request_id):
                if (stream := self.streams.get(request_id)) is not None:
                    stream.put(event)
            case JobFailed():
                self._fail(event)

    def _lose(self, event: Event, error: Exception) -> None:
        _log.error("cannot deliver news of job %r", event.request_id, exc_info=error)
        self._note_lost()
        if not isinstance(event, JobFailed):
            fault = EngineFault(f"fault in the delivery of an answer: {error!r}; report it")
            self._fail(JobFailed(request_id=event.request_id, error=fault))

    def _fail(self, event: JobFailed) -> None:
        future = self.scores.get(event.request_id)
        if future is not None and not future.done():
            future.set_exception(event.error)
        if (parts := self.part_streams.get(event.request_id)) is not None:
            parts.fail(event.error)
        if (stream := self.streams.get(event.request_id)) is not None:
            stream.fail(event.error)
