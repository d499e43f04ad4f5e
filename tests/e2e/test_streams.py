"""How many messages the streams of a server take, and that they say the same."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.served import scrape

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError, GenerateStep

TOKENS, STREAMS = 96, 32


@pytest.fixture
def ports(
    start_server: Callable[..., tuple[object, dict[str, int]]],
    fake_worker: Callable[..., str],
    tiny_model: Path,
) -> dict[str, int]:
    """Steps of 2 ms, whose every token is an "A"."""
    token = ("--vocab-size", 258, "--token", 32)
    address = fake_worker(*token, "--kv-pages", 20_000, "--step-seconds", 0.002)
    return start_server("--model", tiny_model, "--worker", address)[1]


async def stream(
    client: Client, *, interval: int = 0, n: int = 1, **fields: Any
) -> list[GenerateStep]:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text="once upon a time"),
        max_new_tokens=TOKENS,
        ignore_eos=True,
        n=n,
        stream_interval=interval,
        **fields,
    )
    return [step async for step in client.generate(request)]


def by_message(steps: list[GenerateStep], sample: int) -> list[int]:
    """Tokens of a sample in each message."""
    return [
        sum(len(news.token_ids) for news in step.news if news.sample == sample) for step in steps
    ]


def assert_whole(steps: list[GenerateStep], samples: int) -> None:
    assert [step.usage is not None for step in steps] == [False] * (len(steps) - 1) + [True]
    for sample in range(samples):
        news = [news for step in steps for news in step.news if news.sample == sample]
        assert "".join(part.text for part in news) == "A" * TOKENS
        assert [part.finish for part in news] == [""] * (len(news) - 1) + ["length"]


async def test_many_streams_send_fewer_messages_that_say_the_same(ports: dict[str, int]) -> None:
    before = await scrape(ports)
    async with Client(f"127.0.0.1:{ports['rpc']}") as client:
        streams = await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
    after = await scrape(ports)
    for steps in streams:
        assert_whole(steps, 1)
    sent = sum(map(len, streams))
    assert sent < STREAMS * TOKENS / 2
    counted = {
        name: after[name] - before[name]
        for name in after
        if name.startswith("stemserve_stream_messages") and not name.endswith("_created")
    }
    assert counted.pop("stemserve_stream_messages_total") == sent
    assert counted['stemserve_stream_messages_joined_total{cause="pace"}'] > 0
    assert sum(counted.values()) == STREAMS * TOKENS - sent


@pytest.mark.parametrize("n", [1, 3])
async def test_an_interval_is_kept_whatever_the_load(ports: dict[str, int], n: int) -> None:
    async with Client(f"127.0.0.1:{ports['rpc']}") as client:
        streams = await asyncio.gather(*(stream(client, interval=16, n=n) for _ in range(4)))
    for steps in streams:
        assert_whole(steps, n)
        for sample in range(n):
            counts = by_message(steps, sample)
            assert counts[0] < 16
            # A client that is late for one message gets more tokens with the next.
            assert all(count >= 16 for count in counts[1:-1])


@pytest.mark.parametrize("interval", [0, 40])
async def test_stop_strings_across_tokens_end_samples_that_wait_for_a_message(
    ports: dict[str, int], interval: int
) -> None:
    """The string is looked for from token 20 on, and is four tokens long."""
    stop = {"stop": ["AAAA"], "min_new_tokens": 20}
    async with Client(f"127.0.0.1:{ports['rpc']}") as client:
        streams = await asyncio.gather(
            *(stream(client, interval=interval, n=2, **stop) for _ in range(STREAMS // 2))
        )
    for steps in streams:
        for sample in range(2):
            news = [news for step in steps for news in step.news if news.sample == sample]
            assert "".join(part.text for part in news) == "A" * 19
            assert [part.finish for part in news] == [""] * (len(news) - 1) + ["stop"]
            assert sum(len(part.token_ids) for part in news) == 23
        assert steps[-1].usage is not None and steps[-1].usage.output_tokens == 46


async def test_an_interval_of_more_tokens_than_may_wait_is_refused(ports: dict[str, int]) -> None:
    async with Client(f"127.0.0.1:{ports['rpc']}") as client:
        with pytest.raises(ClientError, match="stream_interval.*max_unread_tokens"):
            await stream(client, interval=5_000, n=2)
