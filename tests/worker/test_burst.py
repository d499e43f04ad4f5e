"""A burst of decode steps against the same steps one by one, and bursts that are refused."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.plans import LIMITS, PlanBuilder, blob
from tests.worker.tiny_model import VOCAB, TinyRunner, make_runner, save_tiny_model

from stemserve.kernels.layout import Int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_float32, decode_int32
from stemserve.worker.steps.step import decode_step

PROMPT = 9  # two pages of four and a token
PAGES = {0: [20, 21, 22, 23], 1: [10, 11, 12, 13], 2: [14, 15, 17, 16]}  # of each sample, own
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SAMPLERS = [
    worker_pb2.Sampler(slot=0, temperature=0.0, top_p=1),
    worker_pb2.Sampler(slot=1, temperature=1.0, top_p=1, seed=7, top_logprobs=3),
    worker_pb2.Sampler(
        slot=2,
        temperature=1.3,
        top_p=0.9,
        seed=8,
        min_tokens_banned_ids=blob([3, 4, 5, 6]),
        min_new_tokens=5,
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder, seed=3)
    return folder


def prefill(seed: int) -> worker_pb2.StepPlan:
    plan = PlanBuilder()
    tail = plan.node(1, [2], plan.node(8, [0, 1]))
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, PROMPT).tolist()
    last = plan.prefill(tail, tokens) + PROMPT - 1
    for sampler in SAMPLERS:
        plan.sample(last, sampler.slot)
        plan.samplers.append(sampler)
    return plan.build()


def decode(index: int, slots: list[int]) -> PlanBuilder:
    """The row of token `index` of some samples; the first copies the prompt's tail."""
    plan = PlanBuilder()
    root = plan.node(8, [0, 1])
    stored = 1 + index
    for slot in slots:
        tail = plan.node(stored, PAGES[slot][: -(-stored // 4)], root)
        plan.sample(plan.decode(tail, -1 - slot), slot, index)
        if index == 1:
            plan.copies += [2, PAGES[slot][0], 1]
    return plan


def burst(index: int, steps: dict[int, int], repeat: int) -> worker_pb2.StepPlan:
    """From token `index` on: `steps` of each slot."""
    first, slots = decode(index, list(steps)), list(steps)
    plan = first.build()
    tables = [PAGES[slot][: -(-(index + steps[slot]) // 4)] for slot in slots]
    kv_slots = [
        [
            table[(index + number) // 4] * 4 + (index + number) % 4 if number < steps[slot] else -1
            for slot, table in zip(slots, tables, strict=True)
        ]
        for number in range(repeat)
    ]
    plan.repeat = repeat
    plan.row_steps = blob(list(steps.values()))
    plan.kv_slots = blob([slot for row in kv_slots for slot in row])
    plan.node_page_indptr = blob([0, *(2 + np.cumsum([0, *map(len, tables)])).tolist()])
    plan.node_pages = blob([0, 1, *(page for table in tables for page in table)])
    return plan


def drawn(result: worker_pb2.StepResult) -> tuple[Int32, Int32]:
    assert not result.error
    return (
        decode_int32("", result.sampled_tokens),
        decode_float32("", result.sampled_logprobs).view(np.int32),
    )


def one_by_one(tiny: TinyRunner, start: int, steps: dict[int, int]) -> dict[int, list[int]]:
    """Tokens and bits of log-probabilities of each slot."""
    found: dict[int, list[int]] = {slot: [] for slot in steps}
    for number in range(max(steps.values())):
        slots = [slot for slot, count in steps.items() if count > number]
        result = tiny.runner.step(decode(start + number, slots).build())
        for slot, token, logprob in zip(slots, *drawn(result), strict=True):
            found[slot] += [int(token), int(logprob)]
    return found


@pytest.mark.parametrize("repeat", [2, 3, 8])
@pytest.mark.parametrize("lengths", [(8, 8, 8), (1, 5, 8), (2, 1, 3)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_burst_draws_what_single_steps_draw(
    folder: Path, repeat: int, lengths: tuple[int, ...], device: str
) -> None:
    steps = {slot: min(length, repeat) for slot, length in enumerate(lengths)}
    alone, tiny = (make_runner(folder, device=torch.device(device)) for _ in range(2))
    assert drawn(alone.runner.step(prefill(1)))[0].tolist() == (
        drawn(tiny.runner.step(prefill(1)))[0].tolist()
    )
    expected = one_by_one(alone, 1, steps)
    result = tiny.runner.step(burst(1, steps, repeat))
    tokens, logprobs = (values.reshape(repeat, 3) for values in drawn(result))
    for slot, count in steps.items():
        pairs = np.stack([tokens[:count, slot], logprobs[:count, slot]], 1)
        if len(set(steps.values())) == 1:  # else single steps have fewer rows, and round otherwise
            assert pairs.ravel().tolist() == expected[slot]
        assert pairs[:, 0].tolist() == expected[slot][::2]
    assert len(result.groups) >= 1 and {group.phase for group in result.groups} == {"decode"}
    after = {slot: 1 for slot, count in steps.items() if count == repeat}
    if after:
        more = one_by_one(tiny, 1 + repeat, after)
        again = one_by_one(alone, 1 + repeat, after)
        assert {s: t[0] for s, t in more.items()} == {s: t[0] for s, t in again.items()}


def test_the_likeliest_tokens_of_a_burst_come_step_by_step(folder: Path) -> None:
    alone, tiny = make_runner(folder), make_runner(folder)
    for each in (alone, tiny):
        each.runner.step(prefill(5))
    steps = dict.fromkeys(range(3), 4)
    single = [alone.runner.step(decode(1 + n, [0, 1, 2]).build()) for n in range(4)]
    result = tiny.runner.step(burst(1, steps, 4))
    indptr = decode_int32("", result.top_indptr)
    assert np.diff(indptr).tolist() == [0, 3, 0] * 4
    assert result.top_ids == b"".join(step.top_ids for step in single)


def test_rows_that_fail_are_told_with_their_sub_step(folder: Path) -> None:
    tiny = make_runner(folder)
    tiny.runner.step(prefill(5))
    for layer in range(3):
        tiny.pool.k_pages(layer)[11] = float("nan")  # read from its second token on
    plan = burst(4, {0: 4, 1: 2, 2: 4}, 4)  # row 1 goes on in page 11
    tiny.pool.v_pages(0)[10] = float("nan")
    result = tiny.runner.step(plan)
    assert decode_int32("", result.failed_rows).tolist() == [1, 4]  # behind them it counts no more


def broken(change: Callable[[worker_pb2.StepPlan], object]) -> worker_pb2.StepPlan:
    plan = burst(2, {0: 4, 1: 3, 2: 4}, 4)
    for sampler in SAMPLERS:
        plan.samplers.append(sampler)
    change(plan)
    return plan


def repeating(times: int) -> Callable[[worker_pb2.StepPlan], object]:
    return lambda plan: setattr(plan, "repeat", times)


def setting(name: str, values: list[int]) -> Callable[[worker_pb2.StepPlan], object]:
    return lambda plan: setattr(plan, name, blob(values))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (repeating(9), "repeat is 9; this worker runs at most 8"),
        (repeating(0), "row_steps has 3 numbers; the step needs 0"),
        (setting("row_steps", [1, 1]), "row_steps has 2 numbers"),
        (setting("row_steps", [0, 4, 4]), "row_steps must be in 1..4"),
        (setting("row_steps", [5, 4, 4]), "row_steps must be in 1..4"),
        (setting("row_steps", [4, 4, 4]), "kv_slots: row 1 goes to slot -1 in sub-step 3"),
        (setting("segment_kind", [2, 1, 2]), "a burst has decode segments only"),
        (setting("segment_node", [1, 1, 3]), "segment_node of a burst must differ"),
        (setting("segment_node", [1, 0, 3]), "end in leaves"),
        (setting("segment_node", [1, 7, 3]), "segment_node must be in 0..3"),
        (setting("node_tokens", [8, 3, 0, 3]), "at least one token"),
        (setting("node_tokens", [8, 3, 7, 3]), "reach into its last page"),
        (setting("node_tokens", [8, 3]), "4 node_parent but 2 node_tokens"),
        (setting("positions", [10, 11, 10]), "positions: row 1 has position 11"),
        (setting("sample_rows", [0, 2, 1]), "a burst samples every row once, in order"),
        (setting("gather_rows", [0]), "gather_indptr"),
        (setting("classify_rows", [0]), "a burst reads nothing but its samples"),
    ],
)
def test_a_burst_that_makes_no_sense_is_refused(
    change: Callable[[worker_pb2.StepPlan], object], problem: str
) -> None:
    decode_step(broken(lambda plan: None), LIMITS)
    with pytest.raises(BadPlan, match=re.escape(problem)):
        decode_step(broken(change), LIMITS)
