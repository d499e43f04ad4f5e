"""Tokens between the step loop and a reader."""

import asyncio

import pytest

from stemserve.service.errors import EngineFault, SlowReader
from stemserve.service.request import GenerateChunk, JobUsage, SampleTokens
from stemserve.service.stream_pace import StreamPace
from stemserve.service.workers.message_clock import MessageClock
from stemserve.service.workers.token_stream import TokenStream

NEVER_S = 1e6


def tokens(*token_ids: int, sample: int = 0, finish: str | None = None) -> SampleTokens:
    return SampleTokens(sample, token_ids, [-1.0] * len(token_ids), finish=finish)


def chunk(*token_ids: int, last: bool = False) -> GenerateChunk:
    news = [tokens(*token_ids)] if token_ids else []
    return GenerateChunk(request_id="a", news=news, usage=JobUsage() if last else None)


def make_stream(
    overflows: list[SlowReader] | None = None, *, max_unread_tokens: int = 100
) -> TokenStream:
    heard = [] if overflows is None else overflows
    return TokenStream(max_unread_tokens=max_unread_tokens, on_overflow=heard.append)


def ids(taken: GenerateChunk) -> list[int]:
    return [token_id for news in taken.news for token_id in news.token_ids]


async def test_a_reader_that_waits_gets_each_chunk_as_it_is() -> None:
    stream = make_stream()
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    first = chunk(1, 2)
    stream.put(first)
    assert await waiting is first


async def test_a_reader_that_is_behind_gets_all_tokens_in_order_with_the_usage() -> None:
    stream = make_stream()
    for part in (chunk(1, 2), chunk(3), chunk(4, last=True)):
        stream.put(part)
    taken = await stream.take()
    assert ids(taken) == [1, 2, 3, 4]
    assert taken.usage == JobUsage()


async def test_a_failure_is_raised_after_the_tokens_before_it() -> None:
    stream = make_stream()
    stream.put(chunk(1))
    stream.fail(EngineFault("broken"))
    assert ids(await stream.take()) == [1]
    for _ in range(2):
        with pytest.raises(EngineFault, match="broken"):
            await stream.take()


async def test_a_reader_that_never_reads_is_bounded_and_told_of_once() -> None:
    overflows: list[SlowReader] = []
    stream = make_stream(overflows, max_unread_tokens=4)
    for token in range(10):
        stream.put(chunk(token))
    (error,) = overflows
    assert "4 tokens wait for the client to read them" in str(error)
    assert ids(await stream.take()) == [0, 1, 2, 3]
    with pytest.raises(SlowReader):
        await stream.take()


async def test_one_step_of_many_samples_may_be_more_than_the_bound() -> None:
    overflows: list[SlowReader] = []
    stream = make_stream(overflows, max_unread_tokens=2)
    stream.put(chunk(1, 2, 3))
    assert ids(await stream.take()) == [1, 2, 3]
    assert not overflows


class Reader:
    """Takes from a stream whenever it may, from its second chunk on: the first never waits."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self.taken: list[list[int]] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        last = None
        while last is None or last.usage is None:
            last = await self._stream.take()
            self.taken.append(ids(last))

    async def after(self, *chunks: GenerateChunk) -> list[list[int]]:
        """All that it took, once it had every chance to take these."""
        for part in chunks:
            self._stream.put(part)
            for _ in range(5):
                await asyncio.sleep(0)
        return self.taken

    async def end(self) -> list[list[int]]:
        self._stream.put(chunk(last=True))
        await self._task
        return self.taken


async def test_tokens_wait_for_others_and_the_first_and_last_do_not() -> None:
    pace = StreamPace()
    reader = Reader(TokenStream(pace=pace, clock=MessageClock(lambda: NEVER_S)))
    assert await reader.after(chunk(1)) == [[1]]
    assert await reader.after(chunk(2), chunk(3)) == [[1]]
    ends = GenerateChunk(request_id="a", news=[tokens(4, finish="stop"), tokens(5, sample=1)])
    assert await reader.after(ends) == [[1], [2, 3, 4, 5]]
    assert await reader.after(chunk(6)) == [[1], [2, 3, 4, 5]]
    assert await reader.end() == [[1], [2, 3, 4, 5], [6]]
    assert (pace.joined_by_pace, pace.joined_behind) == (3, 0)


async def test_a_message_waits_for_so_many_tokens_of_one_sample_whatever_the_delay() -> None:
    reader = Reader(TokenStream(pace=StreamPace(least_tokens=3), clock=MessageClock(float)))
    assert await reader.after(chunk(1)) == [[1]]
    both = GenerateChunk(request_id="a", news=[tokens(2), tokens(3, sample=1)])
    assert await reader.after(both, both) == [[1]]
    assert await reader.after(chunk(4)) == [[1], [2, 3, 2, 3, 4]]
    assert await reader.after(chunk(5, 6)) == [[1], [2, 3, 2, 3, 4]]
    assert await reader.end() == [[1], [2, 3, 2, 3, 4], [5, 6]]


async def test_a_sample_that_a_stop_string_ends_does_not_wait() -> None:
    heard: list[list[int]] = []

    def completes(part: GenerateChunk) -> bool:
        heard.append(ids(part))
        return ids(part) == [3]

    pace = StreamPace(completes=completes)
    stream = TokenStream(pace=pace, clock=MessageClock(lambda: NEVER_S))
    reader = Reader(stream)
    assert await reader.after(chunk(1), chunk(2), chunk(3)) == [[1], [2, 3]]
    assert await reader.after(chunk(4)) == [[1], [2, 3]]
    await reader.end()
    assert heard == [[1], [2], [3], [4], []]


async def test_stops_are_looked_for_though_nobody_reads() -> None:
    heard: list[list[int]] = []

    def completes(part: GenerateChunk) -> bool:
        heard.append(ids(part))
        return False

    stream = TokenStream(pace=StreamPace(completes=completes))
    for token in range(4):
        stream.put(chunk(token))
    assert heard == [[0], [1], [2], [3]]


async def test_what_a_slow_reader_makes_wait_is_counted_apart() -> None:
    pace = StreamPace()
    stream = TokenStream(pace=pace, clock=MessageClock(lambda: NEVER_S))
    for token in range(4):
        stream.put(chunk(token))
    assert ids(await stream.take()) == [0, 1, 2, 3]
    assert (pace.joined_by_pace, pace.joined_behind) == (0, 3)


async def test_tokens_that_wait_for_others_do_not_count_as_unread() -> None:
    overflows: list[SlowReader] = []
    stream = TokenStream(
        max_unread_tokens=4,
        clock=MessageClock(lambda: NEVER_S),
        pace=StreamPace(),
        on_overflow=overflows.append,
    )
    reader = Reader(stream)
    assert await reader.after(chunk(1), chunk(2, 3, 4)) == [[1]]
    assert await reader.after(chunk(5, 6)) == [[1], [2, 3, 4, 5, 6]]
    await reader.end()
    assert not overflows
