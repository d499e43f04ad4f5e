"""Counters show that each strategy runs its own code, and that shapes change the choice."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e.engine_rig import EngineRig
from tests.e2e.random_models import VOCAB, MakeRig, RandomModels
from tests.e2e.score_cases import ScoreCase, blob
from tests.kernels.forests import head_shape

from stemserve.kernels.pricing.cost_table_file import shipped_cost_tables
from stemserve.kernels.registry import strategies
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.metrics.labels import OP_PATHS, REASONS
from stemserve.worker.choice.reason import Reason

PREFIX_TOKENS = 40
ITEM_LENGTHS = (3, 1, 5, 1)
SAMPLES = 4
READS_EACH = (
    inference_pb2.KERNEL_NAIVE,
    inference_pb2.KERNEL_SPLIT,
    inference_pb2.KERNEL_RAGGED,
    inference_pb2.KERNEL_PAGED,
)
READS_ONCE = (
    inference_pb2.KERNEL_CASCADE,
    inference_pb2.KERNEL_MULTI_ITEM,
    inference_pb2.KERNEL_CUSTOM_MASK,
    inference_pb2.KERNEL_CODEC,
)
PREFILL_KERNELS = (*READS_EACH[:3], *READS_ONCE[:3])
DECODE_KERNELS = (READS_EACH[3], READS_ONCE[0], READS_ONCE[3])


def random_tokens(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return tokens


def tokens_read(rig: EngineRig, group: worker_pb2.GroupReport) -> int:
    return group.kv_read_bytes // rig.engine.facts.kv_bytes_per_token


def counter(rig: EngineRig, name: str, **labels: str) -> float:
    return rig.registry.get_sample_value(f"stemserve_{name}_total", labels) or 0.0


def path_of(kernel: inference_pb2.Kernel.ValueType) -> str:
    return inference_pb2.Kernel.Name(kernel).removeprefix("KERNEL_").lower()


@pytest.mark.parametrize("kernel", PREFILL_KERNELS)
async def test_items_read_their_prefix_once_or_each_for_itself(
    models: RandomModels, make_rig: MakeRig, kernel: inference_pb2.Kernel.ValueType
) -> None:
    rig = make_rig(models.lm("Llama"))
    items = [random_tokens(number, length) for number, length in enumerate(ITEM_LENGTHS)]
    case = ScoreCase(contexts=[random_tokens(9, PREFIX_TOKENS)], items=items, labels=[[1]])
    await rig.score(case.request)
    before = len(rig.groups)
    answer = await rig.score(case.forced(kernel).request)
    (group,) = rig.groups[before:]
    each = sum(ITEM_LENGTHS) + len(items) * PREFIX_TOKENS
    once = sum(ITEM_LENGTHS) + PREFIX_TOKENS
    expected = once if kernel in READS_ONCE else each
    assert (group.kernel, group.reason) == (kernel, "forced")
    assert tokens_read(rig, group) == expected
    a_token = rig.engine.facts.kv_bytes_per_token
    assert answer.usage.kv_read_bytes == expected * a_token
    assert answer.usage.kv_avoided_bytes == (each - expected) * a_token
    labels = {"op": "prefill", "path": path_of(kernel), "reason": "forced"}
    assert counter(rig, "kernel_selected", **labels) == 1


@pytest.mark.parametrize("kernel", DECODE_KERNELS)
async def test_samples_read_their_prompt_once_or_each_for_itself(
    models: RandomModels, make_rig: MakeRig, kernel: inference_pb2.Kernel.ValueType
) -> None:
    """A sample's own page is the one that it shares with none: the last."""
    rig = make_rig(models.lm("Llama"))
    prompt = random_tokens(5, PREFIX_TOKENS)
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(tokens=blob(prompt)),
        n=SAMPLES,
        max_new_tokens=6,
        ignore_eos=True,
        kernel=kernel,
    )
    await rig.generate(request)
    groups = [group for group in rig.groups if group.phase == "decode"]
    assert {(group.kernel, group.reason) for group in groups} == {(kernel, "forced")}
    shared = PREFIX_TOKENS - PREFIX_TOKENS % rig.engine.facts.page_size
    for step, group in enumerate(groups, 1):
        own = PREFIX_TOKENS - shared + step
        expected = own * SAMPLES + shared * (1 if kernel in READS_ONCE else SAMPLES)
        assert group.rows == SAMPLES
        assert tokens_read(rig, group) == expected
    assert len(groups) == 5


@pytest.mark.parametrize("kernel", [READS_ONCE[0], READS_ONCE[2]])
async def test_nested_contexts_are_read_once_at_every_level(
    models: RandomModels, make_rig: MakeRig, kernel: inference_pb2.Kernel.ValueType
) -> None:
    rig = make_rig(models.lm("Llama"))
    root, left, right = (random_tokens(seed, 32) for seed in (1, 2, 3))
    case = ScoreCase(
        contexts=[root, root + left, root + right, random_tokens(4, 16)],
        items=[[seed] for seed in range(8)],
        item_context=[0, 1, 2, 3] * 2,
        labels=[[1]],
    )
    await rig.score(case.request)
    before = len(rig.groups)
    await rig.score(case.forced(kernel).request)
    assert sum(tokens_read(rig, group) for group in rig.groups[before:]) == 3 * 32 + 16 + 8


async def chosen(rig: EngineRig, request: Any, phase: str) -> inference_pb2.Kernel.ValueType:
    before = len(rig.groups)
    await rig.run(request)
    (group,) = [group for group in rig.groups[before:] if group.phase == phase][-1:]
    assert group.reason == "cost_model"
    return group.kernel


async def test_the_shape_of_a_score_call_changes_the_choice(
    models: RandomModels, make_rig: MakeRig
) -> None:
    rig = make_rig(models.lm("Llama"))
    prefix = random_tokens(1, 1500)
    shapes = {
        "one long item": ScoreCase(contexts=[[1]], items=[random_tokens(2, 300)], labels=[[1]]),
        "many items": ScoreCase(contexts=[prefix], items=[[i, 5] for i in range(60)], labels=[[1]]),
    }
    for case in shapes.values():
        await rig.score(case.request)
    found = {name: await chosen(rig, case.request, "prefill") for name, case in shapes.items()}
    print({name: path_of(kernel) for name, kernel in found.items()})
    assert found["many items"] in READS_ONCE
    assert found["one long item"] != found["many items"]


async def test_a_prompt_with_many_samples_is_read_once(
    models: RandomModels, make_rig: MakeRig
) -> None:
    rig = make_rig(models.lm("Llama"))
    prompt = inference_pb2.Context(tokens=blob(random_tokens(1, 1500)))
    request = inference_pb2.GenerateRequest(prompt=prompt, n=32, max_new_tokens=3, ignore_eos=True)
    assert await chosen(rig, request, "decode") in READS_ONCE


def test_b57_every_choice_of_a_strategy_has_its_series_from_the_start() -> None:
    """A GPU runs the tree kernel in both phases."""
    cpu = strategies(
        head_shape(4, 2, 16),
        device=torch.device("cpu"),
        dtype=torch.float32,
        costs=shipped_cost_tables("cpu")[0],
    )
    choices = {*cpu, *((phase, Kernel.CODEC) for phase in Phase)}
    assert {(phase.value, kernel.value) for phase, kernel in choices} == set(OP_PATHS)
    assert {reason.value for reason in Reason} == set(REASONS)
