"""Score calls with known right answers, most of them faults of other engines, on real models."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.e2e.random_models import MakeRig, RandomModels, random_tokens
from tests.e2e.score_cases import TOLERANCE, ScoreCase, blob, packed
from tests.service.serving import BOS_ID, EOS_ID

from stemserve.proto.v1 import inference_pb2
from stemserve.service.errors import InvalidRequest

SHARED_KERNELS = (
    inference_pb2.KERNEL_UNSPECIFIED,
    inference_pb2.KERNEL_NAIVE,
    inference_pb2.KERNEL_SPLIT,
    inference_pb2.KERNEL_RAGGED,
    inference_pb2.KERNEL_CASCADE,
    inference_pb2.KERNEL_MULTI_ITEM,
    inference_pb2.KERNEL_CUSTOM_MASK,
)
Rng = np.random.Generator
LABEL_TEXTS = ("!", "#")  # tokens 0 and 2
BIGRAMS = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]
EQUAL = 5e-6  # of float32 probabilities that only the shape of a matrix moves


def refusal(answer: object) -> str:
    assert isinstance(answer, InvalidRequest), answer
    return str(answer)


async def test_b01_the_first_item_token_keeps_its_likelihood(
    models: RandomModels, make_rig: MakeRig
) -> None:
    rig = make_rig(models.bigram(np.log(BIGRAMS).tolist()))
    case = ScoreCase(contexts=[[0, 1], [2] * 30 + [0, 1]], items=[[2, 2]] * 2, item_context=[0, 1])
    short = ScoreCase(contexts=[[0, 1]], items=[[2]])
    for _ in range(2):
        answer = await rig.score(case.request)
        expected = math.log(0.3) + math.log(0.5)
        assert answer.scores == pytest.approx([expected] * 2, abs=TOLERANCE)
        assert list(answer.token_logprob_offsets) == [0, 2, 4]
        assert (await rig.score(short.request)).token_logprobs == pytest.approx(
            [math.log(0.3)], abs=TOLERANCE
        )


async def test_b03_each_call_on_a_cached_prefix_has_as_many_logprobs_as_its_item_has_tokens(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    model = models.lm("Qwen2")
    rig = make_rig(model)
    prefix = random_tokens(rng, 100)
    for length in (5, 1, 16, 33, 2):
        case = ScoreCase(contexts=[prefix], items=[random_tokens(rng, length)])
        answer = await rig.score(case.request)
        case.assert_right(model.oracle, answer)
        assert len(answer.token_logprobs) == length


@pytest.fixture(scope="module")
def models_in_halves(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory, dtype="bfloat16")


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kernel", SHARED_KERNELS)
async def test_b08_warm_runs_are_equal_bit_by_bit(
    models: RandomModels,
    models_in_halves: RandomModels,
    make_rig: MakeRig,
    rng: Rng,
    kernel: inference_pb2.Kernel.ValueType,
    halves: bool,
) -> None:
    model = (models_in_halves if halves else models).lm("Llama")
    rig = make_rig(model)
    items = [random_tokens(rng, length) for length in (30, 50, 1)]
    case = ScoreCase(contexts=[random_tokens(rng, 37)], items=items, kernel=kernel)
    runs = [await rig.score(case.request) for _ in range(5)]
    assert [list(run.token_logprobs) for run in runs[2:]] == [list(runs[1].token_logprobs)] * 3
    if not halves:
        case.assert_right(model.oracle, runs[0])
    lossy = model.oracle.in_type(torch.bfloat16)
    exact, theirs = (
        np.concatenate([oracle.token_logprobs(case.contexts[0], item) for item in items])
        for oracle in (model.oracle, lossy)
    )
    for run in runs[:2]:
        lost = np.abs(np.array(run.token_logprobs) - exact).mean()
        assert lost <= 1.5 * np.abs(theirs - exact).mean()


@pytest.mark.parametrize("kernel", SHARED_KERNELS)
async def test_b10_items_do_not_see_one_another(
    models: RandomModels, make_rig: MakeRig, rng: Rng, kernel: inference_pb2.Kernel.ValueType
) -> None:
    model = models.lm("Mistral")
    rig = make_rig(model, max_step_tokens=1024)
    context, item, other = (random_tokens(rng, length) for length in (40, 7, 12))
    case = ScoreCase(contexts=[context], items=[item], labels=[[1], [2], [3]], kernel=kernel)
    alone = np.array((await rig.score(case.request)).scores)
    for between in (other, random_tokens(rng, 500)):
        many = await rig.score(replace(case, items=[item, between, item, item]).request)
        scores = np.array(many.scores).reshape(4, 3)
        for row in (0, 2, 3):
            np.testing.assert_allclose(scores[row], alone, rtol=0, atol=EQUAL)
        assert np.abs(scores[1] - alone).max() > 1e-4


@pytest.mark.parametrize("kernel", inference_pb2.Kernel.values())
async def test_b12_every_kernel_scores_items_right_whether_it_takes_them_or_not(
    models: RandomModels, make_rig: MakeRig, rng: Rng, kernel: inference_pb2.Kernel.ValueType
) -> None:
    """A kernel that cannot mask items is not run, and the answer's groups say so."""
    model = models.lm("Llama")
    rig = make_rig(model)
    items = [random_tokens(rng, length) for length in (2, 1, 3)]
    case = ScoreCase(contexts=[random_tokens(rng, 3)], items=items, kernel=kernel)
    case.assert_right(model.oracle, await rig.score(case.request))
    ran = {(group.kernel, group.reason) for group in rig.groups}
    if kernel in SHARED_KERNELS[1:]:
        assert ran == {(kernel, "forced")}
    else:
        assert ran <= {(kernel, "cost_model") for kernel in SHARED_KERNELS}


@pytest.mark.parametrize("kernel", SHARED_KERNELS)
async def test_b15_special_tokens_in_contexts_and_items_make_no_boundaries(
    models: RandomModels, make_rig: MakeRig, rng: Rng, kernel: inference_pb2.Kernel.ValueType
) -> None:
    model = models.lm("Qwen3")
    rig = make_rig(model)
    context = [BOS_ID, *random_tokens(rng, 10), EOS_ID, *random_tokens(rng, 8), EOS_ID]
    word = random_tokens(rng, 2)
    items = [[EOS_ID], [*word, EOS_ID, *word], word, [BOS_ID, EOS_ID], [EOS_ID]]
    case = ScoreCase(contexts=[context], items=items, kernel=kernel)
    answer = await rig.score(case.request)
    case.assert_right(model.oracle, answer)
    assert len(answer.scores) == len(items)


@pytest.mark.parametrize("kernel", SHARED_KERNELS)
async def test_b14_empty_single_repeated_and_very_uneven_items(
    models: RandomModels, make_rig: MakeRig, rng: Rng, kernel: inference_pb2.Kernel.ValueType
) -> None:
    model = models.lm("Llama")
    rig = make_rig(model, max_step_tokens=int(rng.choice([32, 512])))
    context, first, third = (random_tokens(rng, length) for length in (20, 4, 6))
    case = ScoreCase(contexts=[context], items=[first, third], labels=[[1]], kernel=kernel)
    with_empty = await rig.score(replace(case, items=[first, [], third]).request)
    assert [error.index for error in with_empty.errors] == [1]
    assert "no tokens" in with_empty.errors[0].message
    whole = await rig.score(case.request)
    assert [with_empty.scores[0], with_empty.scores[2]] == pytest.approx(whole.scores, abs=EQUAL)
    assert math.isnan(with_empty.scores[1])
    (none,) = await rig.run(replace(case, items=[]).request)
    assert "there are none" in refusal(none)
    uneven = [random_tokens(rng, length) for length in (1, 1500, 1)]
    for before in (context, list[int]()):
        for items in ([first], [first] * 200, uneven):
            right = replace(case, contexts=[before], items=items)
            right.assert_right(model.oracle, await rig.score(right.request))


@pytest.mark.parametrize("budget", [32, 60])
async def test_b17_answers_keep_the_order_of_the_items(
    models: RandomModels, make_rig: MakeRig, rng: Rng, budget: int
) -> None:
    model = models.lm("Qwen3")
    rig = make_rig(model, max_step_tokens=budget)
    items = [random_tokens(rng, length) for length in range(50, 0, -1)]
    case = ScoreCase(contexts=[random_tokens(rng, 17)], items=items)
    answer = await rig.score(case.request)
    assert list(answer.shape) == [50]
    assert len(set(answer.scores)) == 50
    case.assert_right(model.oracle, answer)


@pytest.mark.parametrize("lengths", [(3, 3), (3, 4), (1, 1, 1)])
@pytest.mark.parametrize("kernel", SHARED_KERNELS)
async def test_b18_sequences_of_equal_length_score_as_they_do_alone(
    models: RandomModels,
    make_rig: MakeRig,
    rng: Rng,
    kernel: inference_pb2.Kernel.ValueType,
    lengths: tuple[int, ...],
) -> None:
    model = models.lm("Llama")
    rig = make_rig(model)
    cases = [
        ScoreCase(
            contexts=[random_tokens(rng, length)], items=[random_tokens(rng, 3)], kernel=kernel
        )
        for length in lengths
    ]
    for case, answer in zip(cases, await rig.run(*(case.request for case in cases)), strict=True):
        case.assert_right(model.oracle, answer)


async def test_b05_scores_stay_right_while_prefixes_push_each_other_out(
    models: RandomModels, make_rig: MakeRig, rng: Rng
) -> None:
    model = models.lm("Qwen3", kv_pages=12)
    rig = make_rig(model, max_step_tokens=64)
    cases = [
        ScoreCase(contexts=[random_tokens(rng, 125)], items=[random_tokens(rng, 3), [1]])
        for _ in range(4)
    ]
    for _ in range(25):
        order: list[int] = rng.integers(0, len(cases), 8).tolist()
        answers = await rig.run(*(cases[at].request for at in order))
        for at, answer in zip(order, answers, strict=True):
            cases[at].assert_right(model.oracle, answer)


@pytest.mark.parametrize("given", ["texts", "token ids", "packed tokens"])
async def test_b28_label_probabilities_are_over_the_whole_vocabulary_unless_softmax_is_asked(
    models: RandomModels, make_rig: MakeRig, given: str
) -> None:
    rig = make_rig(models.bigram([[2.0, 1.0, 0.0, -1.0]] * 4))
    labels = inference_pb2.LabelProbabilities()
    match given:
        case "token ids":
            labels.label_token_ids.extend([0, 2])
        case "packed tokens":
            labels.label_tokens.CopyFrom(packed([[0], [2]]))
        case _:
            labels.labels.extend(LABEL_TEXTS)
    for softmax, expected in ((False, [0.6439, 0.0871]), (True, [0.8808, 0.1192])):
        labels.apply_softmax = softmax
        request = inference_pb2.ScoreRequest(
            contexts=[inference_pb2.Context(tokens=blob([3, 1]))],
            item_tokens=packed([[2]]),
            label_probabilities=labels,
        )
        answer = await rig.score(request)
        assert answer.scores == pytest.approx(expected, abs=1e-4)
        assert answer.label_mass == pytest.approx([0.7311], abs=1e-4)
        assert answer.over_labels == softmax
