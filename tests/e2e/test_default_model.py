"""The default model, served over sockets, against transformers."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from tests.e2e.oracle import Oracle
from tests.e2e.served import check_health, children, generate_to_the_end, until_running
from tests.reference_models import default_reference

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import Client, ClientError, Scores, token_blob
from stemserve.service.request import Int32
from stemserve.service.text.tokenizer import Tokenizer
from stemserve.service.text.tokenizer_files import load_tokenizer

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
Context = inference_pb2.Context

TOLERANCE = 1e-4  # of a log-probability
PATIENCE_S = 120.0
DOCUMENTS = [
    document["text"]
    for document in json.loads(
        (Path(__file__).parents[2] / "examples" / "documents.json").read_text("utf-8")
    )["documents"]
]
QUERY = " How do plants make their food?"
LIKELIHOOD = inference_pb2.LogLikelihood(token_logprobs=True)
AUTO_AND_PREFILL = inference_pb2.Kernel.values()[: inference_pb2.KERNEL_CUSTOM_MASK + 1]
ONE_BY_ONE = inference_pb2.ScoreRequest(kernel=inference_pb2.KERNEL_NAIVE)


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, default_model_path: Path
) -> tuple["subprocess.Popen[str]", dict[str, int]]:
    """With short steps of an odd size: what is longer is computed in chunks."""
    options = ("--kv-pages", 800, "--max-step-tokens", 61)
    return start_server("--model", default_model_path, *options)


@pytest.fixture
async def client(server: tuple[object, dict[str, int]]) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{server[1]['rpc']}", timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def oracle(default_model_path: Path) -> Oracle:
    return Oracle(default_reference(default_model_path))


@pytest.fixture(scope="module")
def tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(default_model_path)


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Of a text as a part of its own; this tokenizer adds no BOS."""

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode_continuations([text])[0].tolist()
        return tokens

    return encode


Ids = Callable[[str], list[int]]


def assert_likelihoods(
    scores: Scores, oracle: Oracle, pairs: list[tuple[list[int], list[int]]]
) -> None:
    for row, (context, item) in enumerate(pairs):
        expected = oracle.token_logprobs(context, item)
        np.testing.assert_allclose(scores.token_logprobs[row], expected, rtol=0, atol=TOLERANCE)
        assert abs(scores.scores[row] - expected.sum()) <= TOLERANCE * len(item)


async def register(client: Client, text: str) -> str:
    request = prefixes_pb2.RegisterRequest(text=text, warm=True)
    return (await client.register(request)).prefix_id


async def test_likelihoods_equal_transformers_and_a_warm_call_computes_its_items_only(
    client: Client, oracle: Oracle, ids: Ids
) -> None:
    context = DOCUMENTS[0]
    items = [" Plants", " It rained on the roof for three days.", QUERY]
    pairs = [(ids(context), ids(item)) for item in items]
    read = sum(len(item) - 1 for _, item in pairs)
    for cached in (0, len(ids(context)) - 1):
        scores = await client.score(items, LIKELIHOOD, query=context)
        assert_likelihoods(scores, oracle, pairs)
        assert scores.usage.cached_tokens == cached
        assert scores.usage.computed_tokens == len(ids(context)) - cached + read


async def test_label_probabilities_equal_transformers(
    client: Client, oracle: Oracle, ids: Ids
) -> None:
    """The last two labels have several tokens, and share the first."""
    context, items = "Review: the food was", [" cold. It is", " warm and good. It is"]
    labels = [" bad", " good", " not very good", " not very bad"]
    mode = inference_pb2.LabelProbabilities(labels=labels)
    assert min(len(ids(label)) for label in labels[2:]) >= 3
    expected = np.exp(
        [
            [oracle.token_logprobs(ids(context) + ids(item), ids(label)).sum() for label in labels]
            for item in items
        ]
    )
    allowed = TOLERANCE * np.array([len(ids(label)) for label in labels])
    for _ in range(2):
        scores = await client.score(items, mode, query=context)
        np.testing.assert_allclose(scores.scores, expected, rtol=0, atol=TOLERANCE)
        assert (np.abs(np.log(scores.scores) - np.log(expected)) <= allowed).all()
        np.testing.assert_allclose(scores.label_mass, expected.sum(axis=1), atol=TOLERANCE)
    mode.apply_softmax = True
    scores = await client.score(items, mode, query=context)
    over_labels = expected / expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(scores.scores, over_labels, rtol=0, atol=TOLERANCE)


async def test_scores_among_other_requests_equal_transformers_with_every_strategy(
    client: Client, oracle: Oracle, ids: Ids, seed: int
) -> None:
    """Prefixes and items of all lengths at once, on a cold and a warm cache.

    They are cut out of texts: on random tokens transformers itself, in float32, may be 6e-4 away
    from what it gives in float64.
    """
    rng = np.random.default_rng(seed)
    corpus = np.array(ids(" ".join(DOCUMENTS)), np.int32)
    pairs: list[tuple[Int32, Int32]] = []
    for before, length in zip((1, 15, 16, 17, 33, 40), (200, 1, 61, 2, 30, 62), strict=True):
        start = int(rng.integers(len(corpus) - before - length))
        middle, end = start + before, start + before + length
        pairs.append((corpus[start:middle], corpus[middle:end]))
    for _ in range(2):
        kernels = rng.permutation(AUTO_AND_PREFILL)[: len(pairs)].tolist()
        calls = [
            client.score_tokens(
                [item, item[:1]],
                LIKELIHOOD,
                contexts=[Context(tokens=token_blob(context))],
                options=inference_pb2.ScoreRequest(kernel=kernel),
            )
            for (context, item), kernel in zip(pairs, kernels, strict=True)
        ]
        company = [generate_to_the_end(client, tokens=20, n=2) for _ in range(3)]
        answers = await asyncio.gather(*calls, *company)
        for (context, item), scores in zip(pairs, answers, strict=False):
            assert scores is not None
            before, tokens = context.tolist(), item.tolist()
            assert_likelihoods(scores, oracle, [(before, tokens), (before, tokens[:1])])


@pytest.mark.parametrize("prompt", [DOCUMENTS[1], "Once upon a time", "1, 2, 3, 4,"])
async def test_greedy_text_equals_transformers(
    client: Client, oracle: Oracle, tokenizer: Tokenizer, ids: Ids, prompt: str
) -> None:
    expected = oracle.greedy(ids(prompt), 16)
    assert expected is not None, "this text is a matter of rounding"
    for n in (1, 3):
        request = inference_pb2.GenerateRequest(
            prompt=Context(text=prompt),
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            max_new_tokens=16,
            ignore_eos=True,
            n=n,
            logprobs=True,
        )
        tokens: list[list[int]] = [[] for _ in range(n)]
        texts = [""] * n
        logprobs: list[list[float]] = [[] for _ in range(n)]
        async for step in client.generate(request):
            for news in step.news:
                tokens[news.sample] += news.token_ids
                texts[news.sample] += news.text
                logprobs[news.sample] += news.logprobs
        assert tokens == [expected] * n
        assert texts == [tokenizer.decode(expected)] * n
        raw = oracle.token_logprobs(ids(prompt), expected)
        for found in logprobs:
            np.testing.assert_allclose(found, raw, rtol=0, atol=TOLERANCE)


async def test_a_ranking_over_registered_documents_equals_one_by_one_scoring(
    client: Client, oracle: Oracle, ids: Ids
) -> None:
    prefix_ids = [await register(client, text) for text in DOCUMENTS]
    ranking = await client.rank(QUERY, prefix_ids)
    again = await client.rank(QUERY, prefix_ids)
    query = ids(QUERY)
    # Each document's last row predicts the query's first token.
    for call in (ranking, again):
        assert call.usage.computed_tokens == len(DOCUMENTS) * len(query)
    np.testing.assert_array_equal(ranking.scores, again.scores)
    alone = [
        float((await client.score([QUERY], LIKELIHOOD, query=text, options=ONE_BY_ONE)).scores[0])
        for text in DOCUMENTS
    ]
    np.testing.assert_allclose(ranking.scores, alone, rtol=0, atol=TOLERANCE * len(query))
    for index in (0, 5):
        expected = oracle.token_logprobs(ids(DOCUMENTS[index]), query).sum()
        assert abs(ranking.scores[index] - expected) <= TOLERANCE * len(query)


async def test_b07_the_prefix_has_the_same_tokens_whatever_follows(
    client: Client, oracle: Oracle, ids: Ids
) -> None:
    text = "An answer of one letter that has a prefix of its own:"
    prefix_id = await register(client, text)
    contexts = [Context(prefix_id=prefix_id)]
    items = [" a", "a", "\n"]
    for item in items:
        scores = await client.score([item], LIKELIHOOD, contexts=contexts)
        assert scores.usage.prompt_tokens == len(ids(text)) + len(ids(item))
        assert scores.usage.cached_tokens == len(ids(text)) - 1
        assert_likelihoods(scores, oracle, [(ids(text), ids(item))])
    together = await client.score(["", *items], LIKELIHOOD, contexts=contexts)
    assert [error.index for error in together.errors] == [0]
    assert together.usage.cached_tokens == len(ids(text)) - 1


@pytest.mark.parametrize(
    ("prefix", "item"),
    [("Ans", "wer"), ("Q: ", "yes"), ("<|im_start|>user\nHello", "<|im_end|>"), ("ans", " wer")],
)
async def test_b20_text_a_registered_prefix_and_token_ids_give_the_same_score(
    client: Client, oracle: Oracle, ids: Ids, prefix: str, item: str
) -> None:
    tokens = np.array(ids(prefix), np.int32)
    ways = {
        "text": (Context(text=prefix), item),
        "registered text": (Context(prefix_id=await register(client, prefix)), item),
        "token ids": (Context(tokens=token_blob(tokens)), item),
        "a registered start": (
            Context(prefix_id=await register(client, prefix[:1]), text=prefix[1:]),
            item,
        ),
    }
    for name, (context, text) in ways.items():
        by_text = await client.score([text], LIKELIHOOD, contexts=[context])
        by_ids = await client.score_tokens(
            [np.array(ids(text), np.int32)], LIKELIHOOD, contexts=[context]
        )
        before = ids(prefix[:1]) + ids(prefix[1:]) if name == "a registered start" else ids(prefix)
        for scores in (by_text, by_ids):
            assert_likelihoods(scores, oracle, [(before, ids(text))])
            assert scores.usage.prompt_tokens == len(before) + len(ids(text))


async def test_a_worker_killed_in_mid_step_fails_its_calls_and_the_next_one_is_right(
    server: tuple["subprocess.Popen[str]", dict[str, int]],
    client: Client,
    oracle: Oracle,
    ids: Ids,
) -> None:
    process, ports = server
    (worker,) = children(process.pid)
    long = np.arange(6000, dtype=np.int32)
    async with asyncio.timeout(PATIENCE_S):
        generating = asyncio.create_task(generate_to_the_end(client, tokens=4000))
        await until_running(client, 1)
        scoring = asyncio.create_task(
            client.score_tokens([long[:5]], LIKELIHOOD, contexts=[Context(tokens=token_blob(long))])
        )
        await until_running(client, 2)
        await asyncio.sleep(0.5)  # the first of a hundred steps
        os.kill(worker, signal.SIGKILL)
        for call in (scoring, generating):
            with pytest.raises(ClientError, match="UNAVAILABLE"):
                await call
        assert await check_health(ports["health"]) == HealthCheckResponse.NOT_SERVING
        assert await check_health(ports["rpc"]) == HealthCheckResponse.NOT_SERVING
        while await check_health(ports["health"]) != HealthCheckResponse.SERVING:
            await asyncio.sleep(0.1)
    assert children(process.pid) != [worker]
    unregistered = f"Nobody asked to keep this warm. {DOCUMENTS[0]}"
    scores = await client.score([QUERY], LIKELIHOOD, query=unregistered)
    assert scores.usage.cached_tokens == 0
    assert_likelihoods(scores, oracle, [(ids(unregistered), ids(QUERY))])
