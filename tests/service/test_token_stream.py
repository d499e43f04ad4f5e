"""Tokens between the step loop and a reader."""

import asyncio

import pytest

from stemserve.service.errors import EngineFault, QueueFull
from stemserve.service.request import GenerateChunk, JobUsage, SampleToken
from stemserve.service.workers.token_stream import TokenStream


def chunk(*token_ids: int, last: bool = False) -> GenerateChunk:
    tokens = tuple(SampleToken(sample=0, token_id=token, logprob=-1.0) for token in token_ids)
    return GenerateChunk(request_id="a", tokens=tokens, usage=JobUsage() if last else None)


def ids(taken: GenerateChunk) -> list[int]:
    return [token.token_id for token in taken.tokens]


async def test_a_reader_that_waits_gets_each_chunk_as_it_is() -> None:
    stream = TokenStream()
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    first = chunk(1, 2)
    stream.put(first)
    assert await waiting is first


async def test_a_reader_that_is_behind_gets_all_tokens_in_order_with_the_usage() -> None:
    stream = TokenStream()
    for part in (chunk(1, 2), chunk(3), chunk(4, last=True)):
        stream.put(part)
    taken = await stream.take()
    assert ids(taken) == [1, 2, 3, 4]
    assert taken.usage == JobUsage()


async def test_a_failure_is_raised_after_the_tokens_before_it() -> None:
    stream = TokenStream()
    stream.put(chunk(1))
    stream.fail(EngineFault("broken"))
    assert ids(await stream.take()) == [1]
    for _ in range(2):
        with pytest.raises(EngineFault, match="broken"):
            await stream.take()


async def test_a_reader_that_never_reads_is_bounded() -> None:
    stream = TokenStream(max_unread_tokens=4)
    for token in range(10):
        stream.put(chunk(token))
    assert ids(await stream.take()) == [0, 1, 2, 3]
    with pytest.raises(QueueFull, match="4 tokens wait to be read"):
        await stream.take()
