"""Parts of answers, and calls of one stream that end alone, on a real server and worker."""

import asyncio
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.e2e.served import until_idle, until_running

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError, Scores

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
TOLERANCE = 1e-4  # of a log-probability


@pytest.fixture(scope="module")
def ports(start_server: StartServer, tiny_model: Path) -> dict[str, int]:
    words: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
    return start_server(*words, "--kv-pages", 100, "--max-step-tokens", 64)[1]


@pytest.fixture
async def client(ports: dict[str, int]) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as client:
        yield client
        await until_idle(client)


def random_request(rng: np.random.Generator, items: int) -> inference_pb2.ScoreRequest:
    """The tokenizer has one token a character."""

    def text(tokens: int) -> str:
        return "".join(map(chr, rng.integers(ord("a"), ord("z") + 1, tokens)))

    lengths: list[int] = rng.integers(1, 20, items).tolist()
    request = inference_pb2.ScoreRequest(query=text(40), items=[text(n) for n in lengths])
    request.log_likelihood.SetInParent()
    return request


async def test_parts_of_many_steps_are_together_the_whole_answer(
    client: Client, rng: np.random.Generator
) -> None:
    request = random_request(rng, 150)
    parts = [part async for part in client.score_parts(request, most_items=20)]
    whole = await client.score_request(request)
    items = np.concatenate([part.item_index for part in parts])
    assert sorted(items.tolist()) == list(range(150)) and len(parts) >= 8
    scores = np.concatenate([part.scores for part in parts])
    np.testing.assert_allclose(scores, whole.scores[items], rtol=0, atol=TOLERANCE)
    assert all(part.more and not part.usage.prompt_tokens for part in parts[:-1])
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_cancelled_call_gives_its_pages_back_and_its_neighbour_is_answered(
    client: Client, rng: np.random.Generator
) -> None:
    long, short = random_request(rng, 5_000), random_request(rng, 3)
    long.request_id, short.request_id = "long", "short"
    steps = asyncio.Event()

    async def messages() -> AsyncGenerator[inference_pb2.ScoreStreamRequest, None]:
        yield inference_pb2.ScoreStreamRequest(request=long, stream_items=50)
        await until_running(client, 1)
        yield inference_pb2.ScoreStreamRequest(request=short)
        await steps.wait()
        yield inference_pb2.ScoreStreamRequest(cancel_request_id="long")

    told, last = 0, dict[str, Scores | ClientError]()
    async for name, answer in client.score_stream(messages()):
        if isinstance(answer, Scores) and answer.more:
            told += len(answer.item_index)
            steps.set()
        else:
            last[name] = answer
    error, scores = last["long"], last["short"]
    assert isinstance(error, ClientError) and error.code is grpc.StatusCode.CANCELLED
    assert isinstance(scores, Scores) and np.isfinite(scores.scores).all()
    assert 0 < told < 5_000
