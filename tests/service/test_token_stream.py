"""Tokens between the step loop and a reader."""

import asyncio

import pytest

from stemserve.service.errors import EngineFault, SlowReader
from stemserve.service.request import GenerateChunk, JobUsage, SampleTokens
from stemserve.service.workers.token_stream import TokenStream


def chunk(*token_ids: int, last: bool = False) -> GenerateChunk:
    news = [SampleTokens(0, token_ids, [-1.0] * len(token_ids))] if token_ids else []
    return GenerateChunk(request_id="a", news=news, usage=JobUsage() if last else None)


def make_stream(
    overflows: list[SlowReader] | None = None, *, max_unread_tokens: int = 100
) -> TokenStream:
    heard = [] if overflows is None else overflows
    return TokenStream(max_unread_tokens=max_unread_tokens, on_overflow=heard.append)


def ids(taken: GenerateChunk) -> list[int]:
    return [token_id for tokens in taken.news for token_id in tokens.token_ids]


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
