"""Draws, against distributions computed one row at a time in plain numpy."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.worker.plans import LIMITS, PlanBuilder, blob
from tests.worker.tiny_model import CPU
from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, encode_float32
from stemserve.worker.sampler import Drawn, Sampler
from stemserve.worker.sampler_params import TokenMask, decode_mask, decode_sampler
from stemserve.worker.step import decode_step
from stemserve.worker.step_reads import Samples
from stemserve.worker.uniform import uniform

B28 = [2.0, 1.0, 0.0, -1.0]


def message(slot: int = 0, **fields: object) -> worker_pb2.Sampler:
    sampler = worker_pb2.Sampler(slot=slot, top_p=1.0)
    for name, value in fields.items():
        setattr(sampler, name, value)
    return sampler


def draw(
    logits: Tensor, samplers: Sequence[worker_pb2.Sampler], index: Sequence[int] | None = None
) -> Drawn:
    """One draw a row, each from its own slot."""
    rows, vocab = logits.shape
    sampler = Sampler(rows, CPU)
    for slot, params in enumerate(samplers):
        params.slot = slot
        sampler.admit([decode_sampler(params, slots=rows, vocab_size=vocab)])
    index = [0] * rows if index is None else index
    return sampler.draw(logits.clone(), samples_of(range(rows), index))


def samples_of(slots: Sequence[int], index: Sequence[int]) -> Samples:
    return Samples(rows=int32(range(len(slots))), slots=int32(slots), index=int32(index))


def allowed(logits: NDArray[np.float64], params: worker_pb2.Sampler) -> NDArray[np.float64]:
    """Probabilities of one row, by sorting; the oracle."""
    scaled = logits / params.temperature
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    p: NDArray[np.float64] = np.exp(scaled - scaled.max())
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    top_p = float(str(np.float32(params.top_p))) or 1.0
    if top_p < 1:
        mass = np.cumsum(p[order])
        last = int(np.argmax(mass >= top_p))
        p[order[last + 1 :]] = 0
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    return p


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


def test_sampled_tokens_feed_later_steps_from_their_slots() -> None:
    sampler = Sampler(4, CPU)
    sampler.admit([decode_sampler(message(slot), slots=4, vocab_size=4) for slot in (2, 3)])
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
    sampler.draw(logits, samples_of([3, 2], [0, 0]))
    assert sampler.tables.token_ids(torch.tensor([40, -1 - 2, -1 - 3])).numpy().tolist() == [
        40,
        3,
        1,
    ]


def decode_plan(slot: int) -> PlanBuilder:
    plan = PlanBuilder()
    plan.sample(plan.decode(plan.node(3, [0]), -1 - slot), slot)
    return plan


def test_a_slot_that_was_never_set_up_is_refused() -> None:
    sampler = Sampler(4, CPU)
    step = decode_step(decode_plan(1).build(), LIMITS)
    with pytest.raises(BadPlan, match="no sampler was sent for slot 1"):
        sampler.check(step)


def test_a_slot_without_a_token_cannot_be_read() -> None:
    sampler = Sampler(4, CPU)
    plan = decode_plan(1)
    plan.samplers = [message(1)]
    step = decode_step(plan.build(), LIMITS)
    with pytest.raises(BadPlan, match="no token was sampled into slot 1"):
        sampler.check(step)
    sampler.admit(step.samplers)
    with pytest.raises(BadPlan, match="no token was sampled into slot 1"):
        sampler.check(step)


@pytest.mark.parametrize(
    ("fields", "index", "expected"),
    [
        ({}, 0, True),
        ({"temperature": 1e-6, "top_k": 5, "seed": 3}, 0, True),
        ({"temperature": 0.5}, 0, False),
        ({"bias_ids": blob([1]), "bias_values": encode_float32(np.ones(1, np.float32))}, 0, False),
        ({"banned_ids": blob([2])}, 0, False),
        ({"min_tokens_banned_ids": blob([2]), "min_new_tokens": 4}, 3, False),
        ({"min_tokens_banned_ids": blob([2]), "min_new_tokens": 4}, 4, True),
        ({"top_logprobs": 2}, 0, False),
        ({"allowed_ids": blob([2])}, 0, False),
        ({"repetition_penalty": 1.1}, 0, False),
        ({"repetition_penalty": 1.0}, 0, True),
        ({"presence_penalty": 0.1}, 0, False),
        ({"frequency_penalty": -0.1}, 0, False),
    ],
)
def test_only_a_plain_greedy_sample_needs_no_logits_of_other_tokens(
    fields: dict[str, object], index: int, expected: bool
) -> None:
    sampler = Sampler(LIMITS.sampler_slots, CPU)
    params = message(2, **fields)
    sampler.admit([decode_sampler(params, slots=LIMITS.sampler_slots, vocab_size=9)])
    samples = Samples(rows=int32([0]), slots=int32([2]), index=int32([index]))
    assert sampler.takes_likeliest(samples).item() is expected


def test_a_taken_token_is_the_next_input_of_its_slot() -> None:
    sampler = Sampler(3, CPU)
    tokens = torch.tensor([7, 9])
    nothing = torch.zeros(2)
    drawn = sampler.take(tokens, nothing, nothing.bool(), int32([2, 0]))
    assert drawn.top_ids.shape == drawn.top_logprobs.shape == (2, 0)
    assert sampler.tables.token_ids(torch.tensor([-1, -3, 5])).numpy().tolist() == [9, 7, 5]


def test_a_slot_that_is_set_up_anew_forgets_its_edits() -> None:
    sampler = Sampler(2, CPU)
    logits = torch.tensor([B28])
    first = message(1, banned_ids=blob([0]), top_logprobs=2)
    for params, token, columns in [(first, 1, 2), (message(1), 0, 0)]:
        sampler.admit([decode_sampler(params, slots=2, vocab_size=4)])
        drawn = sampler.draw(logits, samples_of([1], [0]))
        assert drawn.tokens.numpy().tolist() == [token]
        assert drawn.top_ids.shape == (1, columns)
    assert logits.numpy().tolist() == [B28]


@pytest.mark.parametrize("vocab", [8, 13, 300])
@pytest.mark.parametrize("seed", range(3))
def test_a_mask_leaves_what_it_allows_for_one_step_only(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(0, 3, (4, vocab)), dtype=torch.float32)
    sampler = Sampler(4, CPU)
    params = [message(slot, temperature=1.0, top_k=3, seed=slot) for slot in range(4)]
    params[3].temperature = 0.0
    sampler.admit([decode_sampler(each, slots=4, vocab_size=vocab) for each in params])
    free = sampler.draw(logits.clone(), samples_of(range(4), [0] * 4))
    legal = {slot: rng.choice(vocab, 2, replace=False) for slot in (1, 3)}
    sampler.mask(
        [mask_of(slot, ids, vocab, as_ids=slot % 2 == seed % 2) for slot, ids in legal.items()]
    )
    masked = sampler.draw(logits.clone(), samples_of(range(4), [0] * 4))
    assert not sampler.is_plain(samples_of(range(4), [0] * 4))[[1, 3]].any()
    for slot in range(4):
        token = int(masked.tokens[slot])
        if slot in legal:
            assert token in legal[slot]
        else:
            assert token == int(free.tokens[slot])
        raw = logits[slot].log_softmax(-1)[token]
        assert float(masked.logprobs[slot]) == pytest.approx(float(raw), abs=1e-5)
    assert int(masked.tokens[3]) == max(legal[3], key=lambda token: float(logits[3, token]))
    sampler.mask(())
    again = sampler.draw(logits.clone(), samples_of(range(4), [0] * 4))
    assert torch.equal(again.tokens, free.tokens)


def mask_of(slot: int, ids: NDArray[np.integer], vocab: int, *, as_ids: bool = False) -> TokenMask:
    if as_ids:
        blob = np.sort(ids).astype("<i4").tobytes()
        return decode_mask(worker_pb2.TokenMask(slot=slot, allowed_ids=blob), vocab_size=vocab)
    flags = np.zeros(vocab, np.bool_)
    flags[ids] = True
    bits = np.packbits(flags, bitorder="little").tobytes()
    return decode_mask(worker_pb2.TokenMask(slot=slot, allowed=bits), vocab_size=vocab)


def test_a_mask_of_another_size_or_for_no_sample_is_refused() -> None:
    plan = decode_plan(0).build()
    bits = bytes(-(-LIMITS.vocab_size // 8))
    plan.masks.add(slot=0, allowed=bits[1:])
    with pytest.raises(BadPlan, match="mask of slot 0"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed = bits
    assert decode_step(plan, LIMITS).masks
    plan.masks[0].allowed_ids = np.array([1, 2], "<i4").tobytes()
    with pytest.raises(BadPlan, match="without bits"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed = b""
    assert decode_step(plan, LIMITS).masks[0].ids.tolist() == [1, 2]
    plan.masks[0].allowed_ids = np.array([2, 2], "<i4").tobytes()
    with pytest.raises(BadPlan, match="must ascend"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed_ids = np.array([LIMITS.vocab_size], "<i4").tobytes()
    with pytest.raises(BadPlan, match="mask of slot 0: allowed_ids"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed_ids, plan.masks[0].allowed = b"", bits
    plan.masks[0].slot = 1
    with pytest.raises(BadPlan, match="not sampled"):
        decode_step(plan, LIMITS)
