"""Penalties, against formulas in numpy and the processors of transformers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.worker.plans import LIMITS, PlanBuilder, blob
from tests.worker.tiny_model import CPU
from transformers import RepetitionPenaltyLogitsProcessor

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, encode_float32
from stemserve.worker.sampling.params import decode_sampler
from stemserve.worker.sampling.penalties import Penalties
from stemserve.worker.sampling.sampler import Drawn, Sampler
from stemserve.worker.steps.reads import Samples
from stemserve.worker.steps.step import decode_step

VOCAB = 40


def message(
    slot: int, *, prompt: Sequence[int] = (), drawn: Sequence[int] = (), **fields: Any
) -> worker_pb2.Sampler:
    sampler = worker_pb2.Sampler(slot=slot, top_p=1.0)
    sampler.prompt_ids, sampler.generated_ids = blob(sorted(set(prompt))), blob(drawn)
    for name, value in fields.items():
        setattr(sampler, name, value)
    return sampler


def samples_of(slots: Sequence[int], index: Sequence[int]) -> Samples:
    return Samples(rows=int32(range(len(slots))), slots=int32(slots), index=int32(index))


def admit(sampler: Sampler, *messages: worker_pb2.Sampler, vocab: int = VOCAB) -> None:
    sampler.admit([decode_sampler(m, slots=64, vocab_size=vocab) for m in messages])


def penalised(
    logits: NDArray[np.float32], prompt: Sequence[int], drawn: Sequence[int], *by: float
) -> NDArray[np.float64]:
    """One row by the formulas: repetition, presence, frequency."""
    repetition, presence, frequency = by
    processor: Any = RepetitionPenaltyLogitsProcessor(repetition)
    changed = device_tensor(logits[None].copy(), CPU)
    if len(prompt) + len(drawn):
        seen = torch.tensor([[*prompt, *drawn]])
        changed = processor(seen, changed)
    counts = np.bincount(np.array(drawn, np.int64), minlength=len(logits))
    row: NDArray[np.float64] = changed[0].double().numpy()
    row = row - frequency * counts - presence * (counts > 0)
    return row


def applied(
    logits: NDArray[np.float32], messages: Sequence[worker_pb2.Sampler], index: Sequence[int]
) -> NDArray[np.float32]:
    penalties = Penalties(64, CPU)
    for each in messages:
        penalties.admit(decode_sampler(each, slots=64, vocab_size=logits.shape[1]))
    changed = device_tensor(logits.copy(), CPU)
    slots = int32([each.slot for each in messages])
    penalties.apply(changed, slots, int32(index))
    result: NDArray[np.float32] = changed.numpy()
    return result


def test_penalties_worked_out_by_hand() -> None:
    logits = np.array([[2.0, -1.0, 0.5, 0.0, 3.0]], np.float32)
    params = message(0, prompt=[0, 1], drawn=[2, 2, 1], repetition_penalty=2.0)
    params.presence_penalty, params.frequency_penalty = 0.5, 0.25
    changed = applied(logits, [params], [3])
    assert changed[0].tolist() == [1.0, -2.0 - 0.25 - 0.5, 0.25 - 0.5 - 0.5, 0.0, 3.0]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_penalised_as_by_the_formulas(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (12, VOCAB)).astype(np.float32)
    messages: list[worker_pb2.Sampler] = []
    index: list[int] = []
    expected: list[NDArray[np.float64]] = []
    for row, slot in enumerate(rng.permutation(64)[:12].tolist()):
        by = (rng.choice([1, 0.7, 1.3]), rng.choice([0, -0.5, 1.5]), rng.choice([0, 0.3, -1]))
        prompt: list[int] = rng.integers(0, VOCAB, rng.integers(0, 30)).tolist()
        prompt = prompt if by[0] != 1 else []
        drawn: list[int] = rng.integers(0, VOCAB, rng.integers(0, 50)).tolist()
        values = dict(zip(("repetition", "presence", "frequency"), map(float, by), strict=True))
        named = {f"{name}_penalty": value for name, value in values.items()}
        messages.append(message(slot, prompt=prompt, drawn=drawn, **named))
        index.append(int(rng.integers(0, len(drawn) + 1)))
        expected.append(penalised(logits[row], prompt, drawn[: index[-1]], *map(float, by)))
    changed = applied(logits, messages, index)
    np.testing.assert_allclose(changed, np.stack(expected), rtol=1e-6, atol=1e-6)


def step_by_step(
    logits: NDArray[np.float32],  # [steps, vocab]
    params: worker_pb2.Sampler,
    *,
    start: int = 0,
) -> list[int]:
    sampler = Sampler(64, CPU)
    admit(sampler, params, vocab=logits.shape[1])
    tokens: list[int] = []
    for index in range(start, len(logits)):
        drawn = draw(sampler, logits[index], params.slot, index)
        tokens.append(int(drawn.tokens[0]))
    return tokens


def draw(sampler: Sampler, logits: NDArray[np.float32], slot: int, index: int) -> Drawn:
    return sampler.draw(device_tensor(logits[None].copy(), CPU), samples_of([slot], [index]))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_a_slot_draws_counts_in_its_next_draws(temperature: float) -> None:
    rng = np.random.default_rng(4)
    logits = np.tile(rng.normal(0, 0.2, 300).astype(np.float32), (300, 1))
    params = message(5, temperature=temperature, seed=3, presence_penalty=50.0)
    assert sorted(step_by_step(logits, params)) == list(range(300))


def test_a_generation_that_goes_on_in_another_slot_counts_what_it_drew() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1, (40, 12)).astype(np.float32)
    params = message(9, prompt=[1, 2, 3], temperature=0.7, seed=8, repetition_penalty=1.7)
    params.frequency_penalty = 0.4
    whole = step_by_step(logits, params)
    params.slot, params.generated_ids = 2, blob(whole[:23])
    assert step_by_step(logits, params, start=23) == whole[23:]


def test_a_draw_that_is_done_again_counts_once() -> None:
    sampler = Sampler(64, CPU)
    admit(sampler, message(3, frequency_penalty=1.0), vocab=3)
    logits = np.array([1.5, 1.0, 0.0], np.float32)
    drawn = [int(draw(sampler, logits, 3, index).tokens[0]) for index in (0, 0, 1, 1, 2, 3)]
    assert drawn == [0, 0, 1, 1, 0, 1]


def test_a_slot_that_is_set_up_anew_forgets_what_it_drew() -> None:
    sampler = Sampler(64, CPU)
    logits = np.array([1.5, 1.0, 0.0], np.float32)
    for params in (message(3, presence_penalty=9.0), message(3, presence_penalty=9.0)):
        admit(sampler, params, vocab=3)
        assert [int(draw(sampler, logits, 3, i).tokens[0]) for i in range(3)] == [0, 1, 2]
    admit(sampler, message(3), vocab=3)
    assert int(draw(sampler, logits, 3, 0).tokens[0]) == 0


def test_biases_come_before_penalties_and_bans_after_them() -> None:
    sampler = Sampler(64, CPU)
    bias = encode_float32(np.array([-3.0, 4.0]))
    params = message(0, prompt=[0, 1, 2], repetition_penalty=2.0, banned_ids=blob([2]))
    params.bias_ids, params.bias_values = blob([0, 1]), bias
    params.repetition_penalty = 0.5
    admit(sampler, params, vocab=4)
    # 0: (2 - 3) * 0.5 = -0.5; were it the other way, 4 - 3 = 1. 1: (-2 + 4) / 0.5 = 4, else 3.
    logits = np.array([2.0, -2.0, 9.0, 3.5], np.float32)
    drawn = draw(sampler, logits, 0, 0)
    assert drawn.tokens.item() == 1
    assert drawn.logprobs.item() == pytest.approx(float(log_softmax(logits)[1]), abs=1e-5)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    row = logits.astype(np.float64)
    normal: NDArray[np.float64] = row - np.log(np.exp(row).sum())
    return normal


def test_frequencies_follow_the_penalised_distribution() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0.5], np.float32)
    prompt, before, count = [4, 3], [0, 0, 1], 20_000
    sampler = Sampler(count, CPU)
    params = [
        decode_sampler(
            message(
                slot,
                prompt=prompt,
                drawn=before,
                temperature=0.8,
                seed=slot,
                repetition_penalty=1.4,
                presence_penalty=0.3,
                frequency_penalty=0.5,
            ),
            slots=count,
            vocab_size=5,
        )
        for slot in range(count)
    ]
    sampler.admit(params)
    rows = device_tensor(np.tile(logits, (count, 1)), CPU)
    tokens = sampler.draw(rows, samples_of(range(count), [3] * count)).tokens.numpy()
    weights = np.exp(penalised(logits, prompt, before, 1.4, 0.3, 0.5) / 0.8)
    expected = weights / weights.sum() * count
    found = np.bincount(tokens, minlength=5)
    assert ((found - expected) ** 2 / expected).sum() < 18.5  # 99.9 % of 4 degrees of freedom


def test_a_plan_whose_draws_were_not_seen_is_refused() -> None:
    sampler = Sampler(LIMITS.sampler_slots, CPU)
    params = message(1, drawn=[4, 5], presence_penalty=1.0)
    plan = PlanBuilder()
    plan.sample(plan.decode(plan.node(3, [0]), 7), 1, index=3)
    step = decode_step(plan.build(), LIMITS)
    sampler.admit([decode_sampler(params, slots=LIMITS.sampler_slots, vocab_size=VOCAB)])
    with pytest.raises(BadPlan, match="slot 1 has drawn fewer tokens"):
        sampler.check(step)
    draw(sampler, np.zeros(VOCAB, np.float32), 1, 2)
    sampler.check(step)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"prompt_ids": blob([VOCAB])}, "prompt_ids"),
        ({"generated_ids": blob([-1])}, "generated_ids"),
    ],
)
def test_a_bad_penalty_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadPlan, match=problem):
        decode_sampler(message(0, **fields), slots=4, vocab_size=VOCAB)
