"""Scores worked by hand on a bigram model, and against a row-by-row oracle."""

import math

import numpy as np
import pytest
from tests.service.bigram_engine import THREE_TOKENS, BigramEngine, Float64, random_bigrams
from tests.service.score_calls import answer, ids, label_request, likelihood, make_call

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.scores.score_answer import score_response
from stemserve.service.calls.scores.scoring import nothing_read, plan_score
from stemserve.service.errors import EngineFault, InvalidRequest
from stemserve.service.request import ScoreJob

# logits 2, 1, 0, -1 after any token
FOUR_LOGITS = np.tile(np.exp([2.0, 1, 0, -1]) / np.exp([2.0, 1, 0, -1]).sum(), (4, 1))


async def test_b01_a_likelihood_counts_the_first_token_of_the_item_and_none_of_the_context() -> (
    None
):
    response = await answer(
        BigramEngine(), make_call(likelihood(token_logprobs=True), [ids(2, 2), ids(2)])
    )
    assert response.scores == pytest.approx([math.log(0.3) + math.log(0.5), math.log(0.3)])
    assert response.scores[0] == pytest.approx(-1.8971, abs=1e-4)
    assert response.token_logprobs == pytest.approx([math.log(p) for p in (0.3, 0.5, 0.3)])
    assert list(response.token_logprob_offsets) == [0, 2, 3]
    assert list(response.shape) == [2]


async def test_an_item_is_greedy_if_each_of_its_tokens_is_the_most_likely() -> None:
    items = [ids(1, 1, 1), ids(1, 2), ids(1)]
    response = await answer(BigramEngine(), make_call(likelihood(), items))
    assert list(response.is_greedy) == [True, False, True]


async def test_a_normalized_likelihood_is_a_mean_over_the_tokens() -> None:
    call = make_call(likelihood(length_normalized=True), [ids(2, 2)])
    response = await answer(BigramEngine(), call)
    assert response.scores == pytest.approx([(math.log(0.3) + math.log(0.5)) / 2])


async def test_without_a_context_the_first_token_is_not_scored() -> None:
    call = make_call(likelihood(token_logprobs=True), [ids(1, 2, 0), ids(1)], contexts=[ids()])
    response = await answer(BigramEngine(), call)
    assert response.scores[0] == pytest.approx(math.log(0.3) + math.log(0.25))
    assert list(response.token_logprob_offsets) == [0, 2, 2]
    assert [error.index for error in response.errors] == [1]
    assert math.isnan(response.scores[1])


async def test_nothing_is_read_after_the_last_token_of_a_likelihood() -> None:
    engine = BigramEngine()
    await answer(engine, make_call(likelihood(), [ids(2, 2, 1), ids(2)]))
    (job,) = engine.jobs
    assert isinstance(job, ScoreJob)
    assert job.gather_unit.tolist() == [0, 0, 0, 1]
    assert job.gather_offset.tolist() == [-1, 0, 1, -1]


async def test_b28_label_probabilities_are_over_the_full_vocabulary() -> None:
    response = await answer(
        BigramEngine(FOUR_LOGITS), make_call(label_request(), [ids(1)], labels=[(0,), (2,)])
    )
    assert response.scores == pytest.approx([0.6439, 0.0871], abs=1e-4)
    assert response.label_mass == pytest.approx([0.7311], abs=1e-4)
    assert not response.over_labels
    assert list(response.shape) == [1, 2]


async def test_b28_apply_softmax_gives_probabilities_over_the_labels_and_says_so() -> None:
    request = label_request(apply_softmax=True)
    call = make_call(request, [ids(1)], labels=[(0,), (2,)])
    response = await answer(BigramEngine(FOUR_LOGITS), call)
    assert response.scores == pytest.approx([0.8808, 0.1192], abs=1e-4)
    assert response.label_mass == pytest.approx([0.7311], abs=1e-4)
    assert response.over_labels


async def test_the_temperature_divides_the_label_logprobs() -> None:
    request = label_request(apply_softmax=True, temperature=2.0)
    call = make_call(request, [ids(1)], labels=[(0,), (2,)])
    response = await answer(BigramEngine(FOUR_LOGITS), call)
    assert response.scores[0] == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-4)


async def test_the_mass_counts_a_label_inside_another_once() -> None:
    labels = [(1,), (1, 2), (0, 0)]
    call = make_call(label_request(), [ids(2)], labels=labels)
    response = await answer(BigramEngine(), call)
    assert response.scores == pytest.approx([0.25, 0.25 * 0.3, 0.25 * 0.7])
    assert response.label_mass == pytest.approx([0.25 + 0.25 * 0.7])


def label_oracle(bigrams: Float64, last: int, label: tuple[int, ...]) -> float:
    probability = 1.0
    for token in label:
        probability *= bigrams[last, token]
        last = token
    return probability


@pytest.mark.parametrize("seed", range(8))
async def test_b28_labels_of_several_tokens_are_exact_products(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bigrams = random_bigrams(6, seed)
    drawn = [tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist()) for _ in range(12)]
    labels = list(dict.fromkeys(drawn))
    items = [ids(*rng.integers(0, 6, rng.integers(1, 5))) for _ in range(7)]
    call = make_call(label_request(), items, labels=labels)
    response = await answer(BigramEngine(bigrams), call)
    expected = [[label_oracle(bigrams, item[-1], label) for label in labels] for item in items]
    assert np.reshape(response.scores, response.shape) == pytest.approx(
        np.array(expected), rel=1e-5
    )


async def test_only_branching_label_prefixes_cost_units() -> None:
    engine = BigramEngine()
    labels = [(0,), (1, 2, 0), (1, 2, 1), (1, 1)]
    await answer(engine, make_call(label_request(), [ids(0), ids(2, 2)], labels=labels))
    (job,) = engine.jobs
    assert isinstance(job, ScoreJob)
    assert job.unit_tokens.tolist() == [0, 1, 2, 2, 2, 1, 2]


async def test_item_first_scores_the_query_after_each_item() -> None:
    request = likelihood()
    request.item_first = True
    call = make_call(request, [ids(0), ids(2, 2)], contexts=[ids()], query=ids(2, 1))
    response = await answer(BigramEngine(), call)
    assert response.scores == pytest.approx(
        [math.log(0.1) + math.log(0.25), math.log(0.5) + math.log(0.25)]
    )


async def test_item_first_reads_labels_after_the_query() -> None:
    request = label_request()
    request.item_first = True
    call = make_call(request, [ids(0), ids(2)], query=ids(1), labels=[(2,)])
    response = await answer(BigramEngine(), call)
    assert response.scores == pytest.approx([0.3, 0.3])


async def test_each_item_continues_its_own_context() -> None:
    request = likelihood()
    request.item_context.extend([1, 0, 1])
    call = make_call(request, [ids(2), ids(2), ids(0)], contexts=[ids(0), ids(1, 2)])
    response = await answer(BigramEngine(), call)
    assert response.scores == pytest.approx([math.log(p) for p in (0.5, 0.1, 0.25)])


async def test_classification_reads_the_last_token_of_each_item() -> None:
    request = inference_pb2.ScoreRequest(classification=inference_pb2.Classification())
    engine = BigramEngine(classes=2)
    response = await answer(engine, make_call(request, [ids(0, 2), ids(1)], classes=2))
    assert list(response.scores) == [2, 3, 1, 2]
    assert list(response.shape) == [2, 2]


async def test_classification_with_softmax_sums_to_one() -> None:
    request = inference_pb2.ScoreRequest(
        classification=inference_pb2.Classification(apply_softmax=True)
    )
    engine = BigramEngine(classes=2)
    response = await answer(engine, make_call(request, [ids(0, 2)], classes=2))
    assert response.scores == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])


async def test_top_n_gives_the_best_items_best_first_without_failed_ones() -> None:
    request = likelihood(token_logprobs=True)
    request.top_n = 3
    call = make_call(request, [ids(0), ids(1), ids(), ids(2), ids(1), ids(0, 0)])
    response = await answer(BigramEngine(), call)
    assert list(response.item_index) == [1, 4, 3]
    assert list(response.shape) == [3]
    assert response.scores == pytest.approx([math.log(p) for p in (0.6, 0.6, 0.3)])
    assert response.token_logprobs == pytest.approx(list(response.scores))
    assert [error.index for error in response.errors] == [2]


async def test_top_n_beyond_the_items_gives_all_that_have_a_score() -> None:
    request = label_request()
    request.top_n = 9
    call = make_call(request, [ids(0), ids(), ids(2)], labels=[(0,)])
    response = await answer(BigramEngine(), call)
    assert list(response.item_index) == [0, 2]
    assert len(response.label_mass) == 2


async def test_b14_an_empty_item_is_an_error_and_moves_no_other() -> None:
    response = await answer(BigramEngine(), make_call(likelihood(), [ids(2), ids(), ids(0)]))
    assert response.scores[0] == pytest.approx(math.log(0.3))
    assert math.isnan(response.scores[1])
    assert response.scores[2] == pytest.approx(math.log(0.1))
    assert [(error.index, error.code) for error in response.errors] == [(1, 3)]


async def test_a_call_of_empty_items_only_is_answered_without_the_engine() -> None:
    engine = BigramEngine()
    call = make_call(label_request(), [ids(), ids()], labels=[(0,), (1,)])
    response = await answer(engine, call)
    assert not engine.jobs
    assert np.isnan(response.scores).all()
    assert list(response.shape) == [2, 2]
    assert len(response.errors) == 2


async def test_a_likelihood_of_an_empty_item_only_is_answered() -> None:
    response = await answer(BigramEngine(), make_call(likelihood(token_logprobs=True), [ids()]))
    assert np.isnan(response.scores).all()
    assert list(response.is_greedy) == [False]
    assert list(response.token_logprob_offsets) == [0, 0]


async def test_outputs_that_are_not_finite_are_an_error_of_the_item() -> None:
    engine = BigramEngine()
    engine.failed_units = [1]
    response = await answer(engine, make_call(likelihood(), [ids(2), ids(2), ids(0)]))
    assert np.isnan(response.scores).tolist() == [False, True, False]
    assert [(error.index, error.code) for error in response.errors] == [(1, 13)]
    assert list(response.is_greedy)[1] is False


async def test_b03_too_few_values_from_the_engine_are_a_fault_and_never_a_number() -> None:
    plan = plan_score(make_call(likelihood(), [ids(2)]))
    with pytest.raises(EngineFault, match="0 log-probabilities instead of 1"):
        score_response(plan, nothing_read(plan.call))


async def test_b17_results_keep_the_order_of_fifty_items_of_falling_length() -> None:
    bigrams = random_bigrams(50, 3)
    items = [ids(*([index] * (50 - index))) for index in range(50)]
    response = await answer(BigramEngine(bigrams), make_call(likelihood(), items))
    expected = [
        math.log(bigrams[1, index]) + (49 - index) * math.log(bigrams[index, index])
        for index in range(50)
    ]
    assert response.scores == pytest.approx(expected, rel=1e-5)


async def test_b14_two_hundred_equal_items_score_the_same() -> None:
    response = await answer(BigramEngine(), make_call(likelihood(), [ids(2, 1)] * 200))
    assert len(set(response.scores)) == 1
    assert len(response.scores) == 200


def test_labels_that_repeat_items_beyond_the_limit_are_refused() -> None:
    labels = [(first, 0, 0) for first in range(1000)]
    items = [np.zeros(30, dtype=np.int32)] * 100
    with pytest.raises(InvalidRequest, match="max_request_tokens"):
        plan_score(make_call(label_request(), items, labels=labels))


def test_the_bigram_rows_are_distributions() -> None:
    assert THREE_TOKENS.sum(axis=1) == pytest.approx(np.ones(3))
