"""Malformed requests of all kinds get a proper status, and none reaches the engine."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine
from tests.service.serving import fixed_tokens, serving

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import ClientError
from stemserve.service.limits import Limits

ScoreRequest = inference_pb2.ScoreRequest
GenerateRequest = inference_pb2.GenerateRequest
Change = Callable[[Any], None]

SMALL = Limits(
    max_contexts=2,
    max_items=3,
    max_labels=2,
    max_label_tokens=2,
    max_request_tokens=50,
    max_text_characters=100,
    max_n=2,
    max_stop_strings=1,
    max_stop_characters=3,
    max_top_logprobs=1,
)
VOCABULARY = 3


def words(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def good_score() -> ScoreRequest:
    return ScoreRequest(
        contexts=[inference_pb2.Context(tokens=words(0))],
        item_tokens=inference_pb2.PackedTokens(tokens=words(1, 2, 0), offsets=[0, 1, 3]),
        label_probabilities=inference_pb2.LabelProbabilities(label_token_ids=[0, 2]),
    )


def good_generate() -> GenerateRequest:
    return GenerateRequest(prompt=inference_pb2.Context(tokens=words(0)), max_new_tokens=2)


def change(path: str, value: Any) -> Change:
    """Set a field, named by its path; a list replaces a repeated field."""

    def apply(message: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            message = message[int(parent)] if parent.isdigit() else getattr(message, parent)
        if isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    return apply


def clear(name: str) -> Change:
    def apply(message: Any) -> None:
        message.ClearField(name)

    return apply


BAD_SCORES: list[tuple[str, Change]] = [
    ("request_id", change("request_id", "x" * 300)),
    ("kernel", change("kernel", 99)),
    ("mode", clear("mode")),
    ("contexts", change("contexts", [inference_pb2.Context()] * 3)),
    ("contexts[0].prefix_id", change("contexts.0.prefix_id", "x" * 300)),
    ("contexts[0].tokens", change("contexts.0.tokens", b"abc")),
    ("contexts[0].tokens", change("contexts.0.tokens", words(VOCABULARY))),
    ("query", change("query", "both")),
    ("query", change("item_first", True)),
    ("items", change("items", ["both"])),
    ("items", clear("item_tokens")),
    ("items", change("item_tokens.offsets", [0])),
    ("items", change("item_tokens.offsets", [0, 1, 2, 3, 3])),
    ("item_tokens.tokens", change("item_tokens.tokens", words(1, 2**31, 0))),
    ("item_tokens.tokens", change("item_tokens.tokens", words(1, 2**32 - 1, 0))),
    ("item_tokens.tokens", change("item_tokens.tokens", b"12345")),
    ("item_tokens.offsets", change("item_tokens.offsets", [1, 3])),
    ("item_tokens.offsets", change("item_tokens.offsets", [0, 2])),
    ("item_tokens.offsets", change("item_tokens.offsets", [0, 4])),
    ("item_tokens.offsets", change("item_tokens.offsets", [0, 4, 3])),
    ("item_tokens", change("item_tokens.tokens", words(*[0] * 51))),
    ("item_context", change("item_context", [0])),
    ("item_context", change("item_context", [0, 1])),
    ("truncate_item_tokens", change("truncate_item_tokens", 0)),
    ("label_probabilities", change("label_probabilities.labels", ["a"])),
    ("label_probabilities.labels", change("label_probabilities.label_token_ids", [])),
    ("label_probabilities.labels", change("label_probabilities.label_token_ids", [0, 0])),
    ("label_probabilities.labels", change("label_probabilities.label_token_ids", [0, 1, 2])),
    ("label_probabilities.label_token_ids", change("label_probabilities.label_token_ids", [-1])),
    ("label_probabilities.label_token_ids", change("label_probabilities.label_token_ids", [3])),
    ("label_probabilities.label_token_ids", change("label_probabilities.label_token_ids", [4])),
    (
        "label_probabilities.label_token_ids",
        change("label_probabilities.label_token_ids", [2**31]),
    ),
    ("label_probabilities.temperature", change("label_probabilities.temperature", 2.0)),
    ("label_probabilities.temperature", change("label_probabilities.temperature", float("nan"))),
    ("label_probabilities.temperature", change("label_probabilities.temperature", float("inf"))),
    ("label_probabilities.temperature", change("label_probabilities.temperature", -1.0)),
]

BAD_GENERATES: list[tuple[str, Change]] = [
    ("request_id", change("request_id", "x" * 300)),
    ("kernel", change("kernel", -1)),
    ("prompt", clear("prompt")),
    ("prompt[0].tokens", change("prompt.tokens", words(VOCABULARY))),
    ("prompt", change("prompt.tokens", words(*[0] * 51))),
    ("text", change("prompt.text", "x" * 101)),
    ("n", change("n", 0)),
    ("n", change("n", 3)),
    ("max_new_tokens", change("max_new_tokens", 0)),
    ("min_new_tokens", change("min_new_tokens", 3)),
    ("stop[0]", change("stop", [""])),
    ("stop[0]", change("stop", ["long"])),
    ("stop", change("stop", ["a", "b"])),
    ("stop_token_ids", change("stop_token_ids", [VOCABULARY])),
    ("stop_token_ids", change("stop_token_ids", [-1])),
    ("top_logprobs", change("top_logprobs", 2)),
    ("logprob_token_ids", change("logprob_token_ids", [0] * 129)),
    ("draft_tokens", change("draft_tokens", 33)),
    ("logprob_token_ids", change("logprob_token_ids", [0, VOCABULARY])),
    ("sampling.temperature", change("sampling.temperature", float("nan"))),
    ("sampling.temperature", change("sampling.temperature", float("inf"))),
    ("sampling.temperature", change("sampling.temperature", -1.0)),
    ("sampling.top_p", change("sampling.top_p", 0.0)),
    ("sampling.top_p", change("sampling.top_p", 1.5)),
    ("sampling.top_p", change("sampling.top_p", float("nan"))),
    ("sampling.min_p", change("sampling.min_p", -0.5)),
    ("sampling.min_p", change("sampling.min_p", float("nan"))),
    ("sampling.repetition_penalty", change("sampling.repetition_penalty", 0.0)),
    ("sampling.repetition_penalty", change("sampling.repetition_penalty", -1.5)),
    ("sampling.repetition_penalty", change("sampling.repetition_penalty", 129.0)),
    ("sampling.repetition_penalty", change("sampling.repetition_penalty", float("nan"))),
    ("sampling.presence_penalty", change("sampling.presence_penalty", 101.0)),
    ("sampling.presence_penalty", change("sampling.presence_penalty", float("nan"))),
    ("sampling.frequency_penalty", change("sampling.frequency_penalty", float("-inf"))),
    ("sampling.allowed_token_ids", change("sampling.allowed_token_ids", [VOCABULARY])),
    ("sampling.allowed_token_ids", change("sampling.allowed_token_ids", [0, 1, 2, 2])),
    ("sampling.banned_token_ids", change("sampling.banned_token_ids", [0, 1, 2])),
    ("sampling.banned_token_ids", change("sampling.banned_token_ids", [2**31])),
]


@pytest.mark.parametrize(("field", "spoil"), BAD_SCORES)
async def test_a_malformed_score_request_is_refused_by_field(field: str, spoil: Change) -> None:
    request = good_score()
    spoil(request)
    async with serving(BigramEngine(), limits=SMALL) as served:
        with pytest.raises(ClientError) as refusal:
            await served.client.score_request(request)
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.value.reason == "INVALID_REQUEST"
        assert list(refusal.value.violations) == [field]
        assert not served.engine.jobs
        assert (await served.client.score_request(good_score())).scores.shape == (2, 2)


@pytest.mark.parametrize(("field", "spoil"), BAD_GENERATES)
async def test_a_malformed_generate_request_is_refused_by_field(field: str, spoil: Change) -> None:
    request = good_generate()
    spoil(request)
    async with serving(BigramEngine(), limits=SMALL) as served:
        with pytest.raises(ClientError) as refusal:
            await anext(served.client.generate(request))
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(refusal.value.violations) == [field]
        assert not served.engine.jobs


@pytest.mark.parametrize(
    ("token_id", "bias"), [(-1, 1.0), (3, 1.0), (2**31, 1.0), (0, float("nan")), (0, float("inf"))]
)
async def test_b29_a_bad_bias_is_refused_while_other_streams_finish(
    token_id: int, bias: float
) -> None:
    async with serving(BigramEngine(), limits=SMALL) as served:

        async def run() -> int:
            return len([step async for step in served.client.generate(good_generate())])

        others = [asyncio.create_task(run()) for _ in range(3)]
        request = good_generate()
        request.sampling.logit_bias[token_id] = bias
        with pytest.raises(ClientError) as refusal:
            await anext(served.client.generate(request))
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert await asyncio.gather(*others) == [3, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-4, 0.7])
async def test_b32_tiny_temperatures_are_accepted(temperature: float) -> None:
    request = good_generate()
    request.sampling.temperature = temperature
    async with serving(BigramEngine()) as served:
        assert [step async for step in served.client.generate(request)]


async def test_b28_duplicate_label_texts_and_labels_without_tokens_are_refused() -> None:
    async with serving(BigramEngine(np.full((258, 258), 1 / 258))) as served:
        for labels in (["a", "a"], ["a", ""]):
            mode = inference_pb2.LabelProbabilities(labels=labels)
            with pytest.raises(ClientError, match="same tokens|no tokens"):
                await served.client.score(["x"], mode, query="q")


async def test_a_long_label_is_refused() -> None:
    async with serving(BigramEngine(), limits=SMALL) as served:
        request = good_score()
        labels = inference_pb2.PackedTokens(tokens=words(0, 0, 0), offsets=[0, 3])
        request.label_probabilities.ClearField("label_token_ids")
        request.label_probabilities.label_tokens.CopyFrom(labels)
        with pytest.raises(ClientError, match="max_label_tokens"):
            await served.client.score_request(request)


async def test_a_model_without_the_asked_head_is_unimplemented() -> None:
    async with serving(BigramEngine()) as served:
        with pytest.raises(ClientError, match="no classification head") as refusal:
            await served.client.score(["x"], inference_pb2.Classification())
        assert refusal.value.code is grpc.StatusCode.UNIMPLEMENTED
    engine = BigramEngine(classes=2)
    engine.without_lm_head()
    async with serving(engine) as served:
        with pytest.raises(ClientError, match="classification head only") as refusal:
            await anext(served.client.generate(good_generate()))
        assert refusal.value.code is grpc.StatusCode.UNIMPLEMENTED


async def test_text_for_a_model_without_a_tokenizer_is_refused() -> None:
    async with serving(BigramEngine(), fixed_tokens(b"a", b"b", b"c")) as served:
        with pytest.raises(ClientError, match="no tokenizer; send token ids") as refusal:
            await served.client.score(["x"], inference_pb2.LogLikelihood(), query="q")
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_b47_an_unknown_prefix_is_not_found_and_never_an_empty_one() -> None:
    async with serving(BigramEngine()) as served:
        request = good_score()
        request.contexts[0].prefix_id = "gone"
        with pytest.raises(ClientError, match="'gone' is not registered") as refusal:
            await served.client.score_request(request)
        assert refusal.value.code is grpc.StatusCode.NOT_FOUND
        assert not served.engine.jobs
