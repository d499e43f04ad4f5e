"""Outputs under constraints, of small random models: valid whatever the model would rather say."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.e2e.constraint_cases import (
    WORDS,
    Constrained,
    random_choice,
    random_grammar,
    random_regex,
    random_schema,
)
from tests.e2e.engine_rig import EngineRig, Generated
from tests.e2e.oracle import Oracle, decided
from tests.e2e.random_models import VOCAB, MakeRig, RandomModels, random_tokens
from tests.e2e.score_cases import blob
from tests.service.serving import EOS_ID, byte_tokenizer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.errors import InvalidRequest

STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH
HOT = inference_pb2.SamplingParams(temperature=5.0)
GREEDY = inference_pb2.SamplingParams(temperature=0.0)
FEW_PAGES = 14
AT_ONCE = 25
BYTE_IDS = [byte_tokenizer().token_bytes.index(bytes([byte])) for byte in range(256)]
MAKERS = (random_choice, random_regex, random_schema)


def request(prompt: list[int], **fields: Any) -> inference_pb2.GenerateRequest:
    fields = {"sampling": HOT, "max_new_tokens": 400, **fields}
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(tokens=blob(prompt)), **fields
    )


def engine(models: RandomModels, make_rig: MakeRig, **options: Any) -> EngineRig:
    return make_rig(models.lm("Llama", **options), eos_ids=frozenset({EOS_ID}))


def assert_valid(case: Constrained, answer: object) -> None:
    assert isinstance(answer, Generated), (case.fields, answer)
    for sample, text in answer.text.items():
        assert answer.finish[sample] == STOP, (case.fields, text)
        assert case.accepts(text), (case.fields, text)


@pytest.mark.parametrize("make", MAKERS)
async def test_every_output_of_a_random_constraint_is_valid(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator, make: Callable[..., Any]
) -> None:
    rig = engine(models, make_rig)
    for _ in range(350 // AT_ONCE):
        cases = [make(rng) for _ in range(AT_ONCE)]
        requests = [
            request(random_tokens(rng, 5), n=int(rng.integers(1, 3)), **case.fields)
            for case in cases
        ]
        for case, answer in zip(cases, await rig.run(*requests), strict=True):
            assert_valid(case, answer)


async def test_an_output_of_a_recursive_grammar_is_valid_where_it_ends(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator
) -> None:
    rig = engine(models, make_rig)
    cases = [random_grammar(rng) for _ in range(AT_ONCE)]
    requests = [request(random_tokens(rng, 5), n=2, **case.fields) for case in cases]
    ended = 0
    for case, answer in zip(cases, await rig.run(*requests), strict=True):
        assert isinstance(answer, Generated)
        for sample, text in answer.text.items():
            ended += answer.finish[sample] == STOP
            assert case.accepts(text) or answer.finish[sample] == LENGTH, (case.fields, text)
    assert ended


async def test_constrained_samples_give_way_and_come_back(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator
) -> None:
    """There are pages for each call, but not for all at once."""
    rig = engine(models, make_rig, kv_pages=FEW_PAGES)
    pattern = Constrained(
        fields={"regex": "([ab]{3}-){12}end"},
        accepts=lambda text: len(text) == 51 and text.endswith("-end"),
    )
    requests = [
        request(random_tokens(rng, 20), n=2, max_new_tokens=60, **pattern.fields) for _ in range(6)
    ]
    for answer in await rig.run(*requests):
        assert_valid(pattern, answer)


async def test_a_sample_that_is_cut_by_its_length_says_so(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator
) -> None:
    rig = engine(models, make_rig)
    answer = await rig.generate(request(random_tokens(rng, 5), regex="a{20}", max_new_tokens=7))
    assert (answer.text, answer.finish) == ({0: "aaaaaaa"}, {0: LENGTH})
    answer = await rig.generate(request(random_tokens(rng, 5), regex="a{7}", max_new_tokens=7))
    assert (answer.text, answer.finish) == ({0: "aaaaaaa"}, {0: STOP})


def greedy_choice(oracle: Oracle, prompt: list[int], texts: list[str]) -> str | None:
    """By hand: at each place the likeliest byte with which some text goes on, or the end."""
    said = b""
    blobs = [text.encode() for text in texts]
    while True:
        going_on = [each for each in blobs if each.startswith(said)]
        legal = {each[len(said)] for each in going_on if len(each) > len(said)}
        if not legal:
            return said.decode()
        ids = [BYTE_IDS[byte] for byte in sorted(legal)] + [EOS_ID] * (said in blobs)
        row = np.full(VOCAB, -np.inf)
        row[ids] = oracle.logits([*prompt, *(BYTE_IDS[byte] for byte in said)])[-1][ids]
        if len(ids) > 1 and not decided(row[ids]):
            return None
        best = int(row.argmax())
        if best == EOS_ID:
            return said.decode()
        said += bytes([BYTE_IDS.index(best)])


async def test_greedy_output_is_that_of_transformers_under_the_same_mask(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator
) -> None:
    model = models.lm("Llama")
    rig = engine(models, make_rig)
    texts = [*WORDS, "abc", "abd", "b"]
    prompts = [random_tokens(rng, int(length)) for length in rng.integers(1, 40, 20)]
    choices = inference_pb2.Choices(texts=texts)
    requests = [request(prompt, sampling=GREEDY, choice=choices) for prompt in prompts]
    compared = 0
    for prompt, answer in zip(prompts, await rig.run(*requests), strict=True):
        assert isinstance(answer, Generated)
        expected = greedy_choice(model.oracle, prompt, texts)
        compared += expected is not None
        assert expected in (None, answer.text[0])
    assert compared


async def test_log_probabilities_are_of_the_model_without_the_mask(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator
) -> None:
    model = models.lm("Llama")
    prompt = random_tokens(rng, 9)
    answer = await engine(models, make_rig).generate(
        request(prompt, regex="[a-c]{8}", logprobs=True, top_logprobs=3)
    )
    expected = model.oracle.token_logprobs(prompt, answer.tokens[0])
    np.testing.assert_allclose(answer.logprobs[0], expected, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"regex": "(", "ignore_eos": False}, "regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": ""}, "is empty"),
        ({"json_schema": "{"}, "json_schema: is not valid JSON"),
        ({"json_schema": "[1]"}, "json_schema: is JSON, but no schema"),
        ({"json_schema": '{"type": "thing"}'}, "thing"),
        ({"json_schema": '{"type": "string", "pattern": "("}'}, "json_schema"),
        ({"json_schema": '{"type": "object", "unevaluatedItems": false}'}, "json_schema"),
        ({"json_schema": '{"$ref": "#"}'}, "json_schema"),
        ({"grammar": "start: nobody"}, "grammar"),
        ({"grammar": "start: start"}, "grammar"),
        ({"choice": inference_pb2.Choices(texts=["a", ""])}, "choice"),
        ({"choice": inference_pb2.Choices()}, "choice"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused(
    models: RandomModels, make_rig: MakeRig, fields: dict[str, Any], problem: str
) -> None:
    (answer,) = await engine(models, make_rig).run(request([1], **fields))
    assert isinstance(answer, InvalidRequest) and problem in str(answer)


async def test_a_ban_of_all_that_is_allowed_is_refused(
    models: RandomModels, make_rig: MakeRig
) -> None:
    sampling = inference_pb2.SamplingParams(banned_token_ids=[BYTE_IDS[ord("a")]])
    rig = engine(models, make_rig)
    for pattern, place in (("a", "first"), ("ba", "behind 1")):
        (answer,) = await rig.run(request([1], regex=pattern, sampling=sampling))
        assert isinstance(answer, InvalidRequest) and place in str(answer), answer
    optional = await rig.generate(request([1], regex="ba?", sampling=sampling))
    assert (optional.text, optional.finish) == ({0: "b"}, {0: STOP})


async def test_the_tokens_of_every_output_are_one_of_the_sequences(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator
) -> None:
    rig = engine(models, make_rig)
    for _ in range(300 // AT_ONCE):
        sets = [
            [rng.integers(0, 6, rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, 30))]
            for _ in range(AT_ONCE)
        ]
        requests = [
            request(random_tokens(rng, 5), n=2, token_sequences=packed(sequences))
            for sequences in sets
        ]
        for sequences, answer in zip(sets, await rig.run(*requests), strict=True):
            assert isinstance(answer, Generated), answer
            for sample, tokens in answer.tokens.items():
                said = tokens[:-1] if tokens[-1] == EOS_ID else tokens
                assert said in sequences and answer.finish[sample] == STOP


def packed(sequences: list[list[int]]) -> inference_pb2.PackedTokens:
    ends = np.cumsum([0, *map(len, sequences)])
    tokens = [token for sequence in sequences for token in sequence]
    return inference_pb2.PackedTokens(tokens=blob(tokens), offsets=ends.tolist())


@pytest.mark.parametrize("sequences", [[], [[1], []], [[1, EOS_ID]], [[VOCAB]]])
async def test_sequences_that_are_none_are_refused(
    models: RandomModels, make_rig: MakeRig, sequences: list[list[int]]
) -> None:
    rig = engine(models, make_rig)
    (answer,) = await rig.run(request([1], token_sequences=packed(sequences)))
    assert isinstance(answer, InvalidRequest) and "token_sequences" in str(answer)
