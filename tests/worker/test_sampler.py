"""Draws, against distributions computed one row at a time in plain numpy."""

import numpy as np
import pytest
import torch
from tests.worker.draws import B28, allowed, draw, message
from tests.worker.plans import blob
from tests.worker.tiny_model import CPU

from stemserve.kernels.host_array import device_tensor
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import encode_float32
from stemserve.worker.sampling.uniform import uniform


def random_params(rng: np.random.Generator) -> worker_pb2.Sampler:
    return message(
        temperature=float(rng.choice([0.3, 1.0, 2.5])),
        top_k=int(rng.choice([0, 1, 3, 20])),
        top_p=float(rng.choice([1.0, 0.9, 0.5, 0.05])),
        min_p=float(rng.choice([0.0, 0.2])),
        seed=int(rng.integers(2**63)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_draw_is_the_inverse_of_the_cumulated_distribution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (30, 40)).astype(np.float32)
    samplers = [random_params(rng) for _ in range(30)]
    index = rng.integers(0, 1000, 30)
    drawn = draw(device_tensor(logits, CPU), samplers, index.tolist())
    for row, params in enumerate(samplers):
        p = allowed(logits[row].astype(np.float64), params)
        u = uniform(np.array([params.seed], np.uint64), index[row : row + 1].astype(np.uint64))[0]
        token = int(drawn.tokens[row])
        below, upto = p[:token].sum(), p[: token + 1].sum()
        assert p[token] > 0
        assert below - 1e-6 <= u <= upto + 1e-6


def test_frequencies_follow_the_distribution() -> None:
    params = message(temperature=0.7, seed=99)
    logits = torch.tensor([B28]).expand(20_000, -1)
    drawn = draw(logits, [params] * 20_000, range(20_000))
    counts = np.bincount(drawn.tokens.numpy(), minlength=4)
    expected = allowed(np.array(B28), params) * 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 99.9 % of 3 degrees of freedom


@pytest.mark.parametrize("vocab", [1500, 5000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(0, 0.9, 0.9), (1200, 1.0, None), (1200, 0.5, None)]
)
def test_long_tails_are_cut_at_the_right_token(
    vocab: int, top_k: int, top_p: float, kept: float | None
) -> None:
    """Equal tokens: more stay than are sorted first, and those with the lowest ids."""
    most = top_k or vocab
    count = round(most * top_p) if kept is None else round(vocab * kept)
    params = message(temperature=1.0, top_k=top_k, top_p=top_p, seed=3)
    logits = torch.zeros(400, vocab)
    tokens = draw(logits, [params] * 400, range(400)).tokens
    assert int(tokens.max()) < count
    assert int(tokens.max()) > 0.9 * count


def test_ties_at_the_edge_of_top_k_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 2.0]]).expand(200, -1)
    tokens = draw(logits, [message(temperature=5.0, top_k=3, seed=1)] * 200, range(200)).tokens
    assert set(tokens.numpy().tolist()) == {1, 2, 4}


def test_a_top_p_of_three_tenths_of_ten_equal_tokens_is_three_tokens() -> None:
    logits = torch.zeros(200, 10)
    tokens = draw(logits, [message(temperature=1.0, top_p=0.3, seed=1)] * 200, range(200)).tokens
    assert set(tokens.numpy().tolist()) == {0, 1, 2}


def test_b32_cold_rows_are_greedy_and_leave_their_neighbours_alone() -> None:
    temperatures = [0.0, 1.0, 1e-4, 0.7, 1e-5, 1e-12]
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(4))
    logits[0, [7, 9]] = 9.0  # a tie
    logits[3, 1:] = -torch.inf
    samplers = [message(temperature=t, seed=i) for i, t in enumerate(temperatures)]
    drawn = draw(logits, samplers)
    assert drawn.tokens[0] == 7
    assert drawn.tokens[[2, 4, 5]].numpy().tolist() == logits[[2, 4, 5]].argmax(-1).numpy().tolist()
    assert drawn.tokens[3] == 0
    alone = draw(logits[1:2], samplers[1:2])
    assert (drawn.tokens[1], drawn.logprobs[1]) == (alone.tokens[0], alone.logprobs[0])
    assert not drawn.failed.any() and not drawn.logprobs.isnan().any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["all banned", "nan", "inf"])
def test_a_row_without_a_finite_choice_fails_alone(temperature: float, bad: str) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    samplers = [message(temperature=temperature, top_k=4, top_p=0.9, seed=i) for i in range(3)]
    good = draw(logits[[0, 2]], [samplers[0], samplers[2]])
    if bad == "all banned":
        samplers[1].banned_ids = blob(range(8))
    else:
        logits[1, 3] = float(bad)
    drawn = draw(logits, samplers)
    assert drawn.failed.numpy().tolist() == [False, True, False]
    assert drawn.tokens[[0, 2]].numpy().tolist() == good.tokens.numpy().tolist()
    assert 0 <= int(drawn.tokens[1]) < 8


def test_b36_the_same_seed_repeats_in_any_batch_and_others_differ() -> None:
    logits = torch.zeros(4, 1000)
    seeds = [7, 8, 0, 2**64 - 1]
    samplers = [message(temperature=1.0, seed=seed) for seed in seeds]
    together = torch.stack([draw(logits, samplers, [i] * 4).tokens for i in range(20)], 1)
    assert len({tuple(row) for row in together.numpy().tolist()}) == 4
    for row, params in enumerate(samplers):
        alone = [int(draw(logits[:1], [params], [i]).tokens[0]) for i in range(20)]
        assert alone == together[row].numpy().tolist()


def test_b37_logprobs_are_raw() -> None:
    params = message(
        temperature=0.5,
        top_p=0.7,
        top_logprobs=3,
        bias_ids=blob([0]),
        bias_values=encode_float32(np.array([3.0])),
    )
    drawn = draw(torch.tensor([B28]), [params])
    assert drawn.tokens.numpy().tolist() == [0]
    assert drawn.logprobs.numpy().tolist() == pytest.approx([-0.4402], abs=1e-4)
    assert drawn.top_ids.numpy().tolist() == [[0, 1, 2]]
    top = drawn.top_logprobs[0].numpy().tolist()
    assert top == pytest.approx([-0.4402, -1.4402, -2.4402], abs=1e-4)


def test_top_logprobs_are_counted_a_sample_and_ties_come_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 1.0], [5.0, 0.0, 4.0, 0.0, 0.0]])
    drawn = draw(logits, [message(top_logprobs=2), message(top_logprobs=4)])
    assert drawn.top_counts.tolist() == [2, 4]
    assert drawn.top_ids[0, :2].numpy().tolist() == [1, 2]
    assert drawn.top_ids[1].numpy().tolist() == [0, 2, 1, 3]


def test_a_bias_moves_the_choice_and_minus_100_forbids_it() -> None:
    logits = torch.tensor([B28, B28])
    biases = [([3], [10.0]), ([0, 1], [-100.0, -np.inf])]
    samplers = [
        message(bias_ids=blob(ids), bias_values=encode_float32(np.array(values)))
        for ids, values in biases
    ]
    assert draw(logits, samplers).tokens.numpy().tolist() == [3, 2]


def test_end_tokens_are_banned_until_enough_tokens_are_there() -> None:
    params = message(min_tokens_banned_ids=blob([0, 1]), banned_ids=blob([2]), min_new_tokens=3)
    logits = torch.tensor([B28])
    tokens = [int(draw(logits, [params], [index]).tokens[0]) for index in range(5)]
    assert tokens == [3, 3, 3, 0, 0]
