"""Beams under constraints: over sets of ids those of transformers, over texts valid ones only."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.e2e.constraint_cases import (
    Constrained,
    random_choice,
    random_grammar,
    random_regex,
    random_schema,
)
from tests.e2e.engine_rig import EngineRig, Generated
from tests.e2e.generate_cases import generation
from tests.e2e.random_models import FAMILIES, VOCAB, MakeRig, RandomModels, random_tokens
from tests.e2e.set_search import (
    ENDS,
    NONE_LEFT,
    STOP,
    SetSearch,
    any_search,
    assert_found,
    decided_search,
)
from tests.e2e.test_constraints import engine, packed
from tests.service.serving import EOS_ID

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import ANYONE
from stemserve.service.calls.tries.trie_registry import NewTrie
from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import pack

Rng = np.random.Generator
AT_ONCE = 20


@pytest.mark.parametrize("number", range(12))
async def test_beams_over_a_set_are_those_of_transformers(
    models: RandomModels, make_rig: MakeRig, seed: int, number: int
) -> None:
    rng = np.random.default_rng(seed)
    model = models.seeded(FAMILIES[number % len(FAMILIES)], seed)
    rig = make_rig(
        model, max_step_tokens=int(rng.choice([5, 64])), eos_ids=frozenset({EOS_ID, VOCAB + 7})
    )
    searches = [decided_search(rng, model.oracle) for _ in range(3)]
    for search in searches:
        assert_found(await rig.generate(search.request), search, model.oracle)
    beside = generation(searches[0].prompt, n=3, max_new_tokens=20)
    answers = await rig.run(*(search.request for search in searches), beside)
    for search, answer in zip(searches, answers, strict=False):
        assert_found(answer, search, model.oracle)


async def test_a_search_as_wide_as_its_set_ranks_all_of_it(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    """256 beams, of which many find no sequence; each that does has the score of a plain sum."""
    model = models.lm("Llama")
    alphabet = rng.permutation(VOCAB - 20)[:9]
    sequences: list[list[int]] = [
        rng.choice(alphabet, rng.integers(1, 6)).tolist() for _ in range(90)
    ]
    whole = {(*each, EOS_ID) for each in sequences}
    search = SetSearch(
        prompt=random_tokens(rng, 20),
        sequences=sequences,
        width=256,
        best=256,
        penalty=1.0,
        mode=inference_pb2.EARLY_STOPPING_NEVER,
    )
    request = search.request
    request.ClearField("stop_token_ids")
    answer = await engine(models, make_rig).generate(request)
    assert {tuple(answer.tokens[rank]) for rank in range(len(whole))} == whole
    assert [answer.finish[rank] for rank in range(len(whole), 256)] == [NONE_LEFT] * (
        256 - len(whole)
    )
    scores = [answer.scores[rank] for rank in range(len(whole))]
    assert scores == sorted(scores, reverse=True)
    sums = [
        model.oracle.token_logprobs(search.prompt, answer.tokens[rank]).mean()
        for rank in range(len(whole))
    ]
    np.testing.assert_allclose(scores, sums, atol=1e-3)


def searching(rng: Rng, case: Constrained, *, best: int = 3) -> inference_pb2.GenerateRequest:
    request = generation(random_tokens(rng, 5), ignore_eos=False, max_new_tokens=60, n=best)
    request.ClearField("sampling")
    request.MergeFrom(inference_pb2.GenerateRequest(**case.fields))
    request.beam_search.width = 4
    return request


@pytest.mark.parametrize("make", [random_choice, random_regex, random_schema, random_grammar])
async def test_every_sequence_of_a_search_is_valid_and_another(
    models: RandomModels, make_rig: MakeRig, rng: Rng, make: Callable[..., Any]
) -> None:
    rig = engine(models, make_rig)
    cases = [make(rng) for _ in range(AT_ONCE)]
    found = 0
    answers = await rig.run(*(searching(rng, case) for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        assert isinstance(answer, Generated), (case.fields, answer)
        told = [tuple(tokens) for tokens in answer.tokens.values() if tokens]
        assert len(set(told)) == len(told)
        for rank, text in answer.text.items():
            assert answer.finish[rank] in (STOP, NONE_LEFT)
            assert answer.finish[rank] == NONE_LEFT or case.accepts(text), (case.fields, text)
        found += len(told)
    assert found


async def test_choices_come_in_the_order_of_their_likelihood(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    """The tokens are bytes, so that there is one way to write a choice."""
    model = models.lm("Llama")
    texts = ["yes", "no", "maybe", "never"]
    case = Constrained(
        fields={"choice": inference_pb2.Choices(texts=texts)}, accepts=texts.__contains__
    )
    request = searching(rng, case, best=6)
    request.beam_search.width = 6
    request.beam_search.length_penalty = 0.0
    answer = await engine(models, make_rig).generate(request)
    assert sorted(answer.text[rank] for rank in range(4)) == sorted(texts)
    assert [answer.finish[rank] for rank in (4, 5)] == [NONE_LEFT] * 2
    prompt = np.frombuffer(request.prompt.tokens, "<u4").tolist()
    sums = [
        model.oracle.token_logprobs(prompt, answer.tokens[rank]).sum().item() for rank in range(4)
    ]
    assert sums == sorted(sums, reverse=True)
    np.testing.assert_allclose([answer.scores[rank] for rank in range(4)], sums, atol=1e-3)


@pytest.mark.parametrize("kv_pages", [20, 700])
async def test_searches_give_way_and_come_back_under_their_constraint(
    models: RandomModels, make_rig: MakeRig, rng: Rng, kv_pages: int
) -> None:
    rig = engine(models, make_rig, kv_pages=kv_pages)
    case = Constrained(
        fields={"regex": "([ab]{3}-){8}end"},
        accepts=lambda text: len(text) == 35 and text.endswith("-end"),
    )
    for answer in await rig.run(*(searching(rng, case) for _ in range(4))):
        assert isinstance(answer, Generated), answer
        assert all(map(case.accepts, answer.text.values())) and len(answer.text) == 3


@pytest.mark.parametrize(
    ("fields", "eos_ids", "field"),
    [
        ({"regex": "a+", "stop_token_ids": [3]}, {EOS_ID}, "stop_token_ids"),
        ({"token_sequences": packed([[1, 3]]), "stop_token_ids": [3]}, {EOS_ID}, "stop_token_ids"),
        ({"token_sequences": packed([[1, 3]])}, set[int](), "beam_search"),
        ({"regex": "a+", "ignore_eos": True}, {EOS_ID}, "ignore_eos"),
    ],
)
async def test_a_search_whose_end_is_not_clear_is_refused(
    models: RandomModels,
    make_rig: MakeRig,
    rng: Rng,
    fields: dict[str, Any],
    eos_ids: set[int],
    field: str,
) -> None:
    rig: EngineRig = make_rig(models.lm("Llama"), eos_ids=frozenset(eos_ids))
    case = Constrained(fields=fields, accepts=lambda text: True)
    (answer,) = await rig.run(searching(rng, case))
    assert isinstance(answer, InvalidRequest) and answer.field == field, answer


@pytest.mark.parametrize("run", range(4))
async def test_no_output_of_a_trie_is_another_drawn_or_searched(
    models: RandomModels, make_rig: MakeRig, rng: Rng, run: int
) -> None:
    """Random sets under ids, sampling and searching at once, with few pages in half of the runs."""
    rig = engine(models, make_rig, kv_pages=60 if run % 2 else 700)
    sets: list[list[list[int]]] = []
    requests: list[inference_pb2.GenerateRequest] = []
    for number in range(AT_ONCE):
        search = any_search(rng)
        sets.append(search.sequences)
        name, arrays = f"set-{number}", [np.array(each, np.int32) for each in search.sequences]
        trie = rig.tries.builder.build("sequences", pack(arrays))
        new = NewTrie(trie_id=name, trie=trie, digest=name, ttl_s=0.0)
        rig.tries.registry.put(ANYONE, new)
        request = search.request
        request.trie_id = name
        if number % 2:
            request.ClearField("beam_search")
            request.n = int(rng.integers(1, 5))
            request.sampling.temperature = float(rng.choice([0.0, 1.0, 9.0]))
        requests.append(request)
    for sequences, request, answer in zip(sets, requests, await rig.run(*requests), strict=True):
        assert isinstance(answer, Generated), answer
        for sample in range(request.n):
            tokens, finish = answer.tokens[sample], answer.finish[sample]
            if finish == NONE_LEFT:
                assert request.HasField("beam_search") and not tokens
                continue
            assert finish == STOP
            whole = tokens[:-1] if tokens[-1] in ENDS else tokens
            assert whole in sequences
