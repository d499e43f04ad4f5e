"""When tokens that wait are sent."""

import asyncio
from functools import partial

from stemserve.service.request import GenerateChunk, SampleTokens
from stemserve.service.workers.message_clock import MessageClock
from stemserve.service.workers.token_stream import TokenStream

NEVER_S = 1e6


async def turns() -> None:
    """Of the loop, as many as anything without a delay takes."""
    for _ in range(5):
        await asyncio.sleep(0)


def chunk(token: int) -> GenerateChunk:
    return GenerateChunk(request_id="a", news=[SampleTokens(0, [token], [-1.0])])


async def test_all_who_wait_are_released_together_and_once() -> None:
    released: list[str] = []
    clock = MessageClock(lambda: 0.01)
    for name in ("a", "b", "c"):
        clock.wait(partial(released.append, name))
    assert released == []
    await turns()
    assert released == ["a", "b", "c"]
    async with asyncio.timeout(60):
        done = asyncio.Event()
        clock.wait(done.set)
        await done.wait()
    assert released == ["a", "b", "c"]


async def test_the_delay_counts_from_the_last_moment_and_is_asked_for_each_time() -> None:
    released: list[str] = []
    delays = iter([0.0, NEVER_S, 0.0])
    clock = MessageClock(lambda: next(delays))
    clock.wait(partial(released.append, "at once"))
    await turns()
    clock.wait(partial(released.append, "never"))
    await turns()
    assert released == ["at once"]
    clock.wait(partial(released.append, "never"))  # the moment is set
    await turns()
    assert released == ["at once"]
    assert next(delays) == 0.0


async def test_tokens_are_taken_after_the_delay_though_no_others_come() -> None:
    streams = [TokenStream(clock=MessageClock(lambda: 0.01)) for _ in range(3)]
    for token in range(4):
        for stream in streams:
            stream.put(chunk(token))
        async with asyncio.timeout(60):
            for stream in streams:
                assert (await stream.take()).news == chunk(token).news


async def test_what_was_taken_before_its_moment_is_not_taken_again() -> None:
    stream = TokenStream(clock=MessageClock(lambda: 0.001))
    stream.put(chunk(0))
    assert (await stream.take()).news == chunk(0).news
    stream.put(chunk(1))  # waits
    stream.put(GenerateChunk(request_id="a", news=[SampleTokens(0, [2], [-1.0], finish="stop")]))
    assert (await stream.take()).num_tokens == 2
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    stream.put(chunk(3))
    async with asyncio.timeout(60):
        assert (await waiting).news == chunk(3).news
