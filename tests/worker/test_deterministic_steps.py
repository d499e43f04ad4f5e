"""Steps of a worker with --deterministic: the same rows in different steps have the same bits.

A model with random weights that needs nothing but its description; on a GPU with its graphs.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.worker.decode_rig import COSTS
from tests.worker.plans import PlanBuilder, blob

from stemserve.kernels.pricing.cost_table_file import tables_json
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, decode_int32
from stemserve.worker.config import parse_config
from stemserve.worker.runner import ModelRunner
from stemserve.worker.start import make_parts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
VOCAB, PAGE = 515, 16
LABELS = [5, 77]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
Float32 = NDArray[np.float32]


@pytest.fixture(scope="module", params=DEVICES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    costs = folder / "costs.json"
    costs.write_text(tables_json([COSTS]))
    return start(folder, costs, request.param)


def start(folder: Path, costs: Path, device: str) -> ModelRunner:
    options = {
        "--listen": "unix:/unused",
        "--model": folder,
        "--load-format": "dummy",
        "--device": device,
        "--dtype": DTYPES[device],
        "--kv-pages": 900,
        "--max-step-tokens": 8192,
        "--sampler-slots": 100,
        "--max-burst-steps": 8,
        "--cost-table": costs,
    }
    words = [str(word) for pair in options.items() for word in pair]
    config = parse_config([*words, "--deterministic"])
    return make_parts(config, lambda done, total: None, lambda: None).runner


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh every run; a failing test shows its seed."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    found: list[int] = rng.integers(0, VOCAB, count).tolist()
    return found


def pages(first: int, count: int) -> list[int]:
    return list(range(first, first - (-count // PAGE)))


@dataclass(frozen=True, kw_only=True)
class Call:
    context: list[int]
    items: list[list[int]]
    first_page: int

    @classmethod
    def random(cls, rng: np.random.Generator, context: int, items: int, first_page: int) -> "Call":
        lengths = rng.integers(1, 70, items).tolist()
        return cls(
            context=tokens(rng, context),
            items=[tokens(rng, length) for length in lengths],
            first_page=first_page,
        )

    def add_context(self, plan: PlanBuilder, start: int, stop: int, *, stored: bool = True) -> int:
        """Tokens start .. stop - 1; the last token of all is read."""
        node = plan.node(stop, pages(self.first_page, stop))
        row = plan.prefill(node, self.context[start:stop], stored=stored)
        if stop == len(self.context):
            plan.gather(row + stop - start - 1, LABELS)
        return node

    def add_items(self, plan: PlanBuilder, node: int, order: Sequence[int]) -> None:
        for item in order:
            row = plan.item(node, self.items[item])
            plan.gather(row + len(self.items[item]) - 1, LABELS)

    def cached(self, plan: PlanBuilder) -> int:
        return plan.node(len(self.context), pages(self.first_page, len(self.context)))


def builder() -> PlanBuilder:
    return PlanBuilder(page_size=PAGE)


def read(runner: ModelRunner, plan: PlanBuilder) -> Float32:  # [gathers, labels]
    result = runner.step(plan.build())
    assert not result.error
    return decode_float32("", result.gather_logprobs).reshape(-1, len(LABELS))


def in_one_step(runner: ModelRunner, call: Call, order: Sequence[int]) -> Float32:
    plan = builder()
    call.add_items(plan, call.add_context(plan, 0, len(call.context)), order)
    return read(runner, plan)


def in_chunks(runner: ModelRunner, call: Call, cuts: Sequence[int]) -> Float32:
    last = worker_pb2.StepResult()
    for start, stop in zip(cuts, [*cuts[1:], len(call.context)], strict=True):
        plan = builder()
        call.add_context(plan, start, stop)
        last = runner.step(plan.build())
    first = decode_float32("", last.gather_logprobs).reshape(1, -1)
    plan = builder()
    call.add_items(plan, call.cached(plan), range(len(call.items)))
    return np.concatenate([first, read(runner, plan)])


def test_scores_do_not_depend_on_chunks_on_the_cache_or_on_the_order(
    runner: ModelRunner, rng: np.random.Generator
) -> None:
    call = Call.random(rng, int(rng.integers(200, 1300)), 9, 0)
    length, every = len(call.context), range(len(call.items))
    expected = in_one_step(runner, call, every)
    order: list[int] = rng.permutation(len(call.items)).tolist()
    assert np.array_equal(in_one_step(runner, call, order)[1:], expected[1:][order])
    for cuts in ([0, 17, 48, 150], [0, length - 1], list(range(0, length, 130))):
        assert np.array_equal(in_chunks(runner, call, cuts), expected), cuts
    again = builder()
    node = call.add_context(again, length - 1, length, stored=False)
    call.add_items(again, node, every)
    assert np.array_equal(read(runner, again), expected)


def test_scores_do_not_depend_on_neighbours(runner: ModelRunner, rng: np.random.Generator) -> None:
    call, first, last = (Call.random(rng, n, 6, page) for n, page in ((333, 0), (90, 50), (700, 9)))
    last = Call(context=last.context, items=last.items, first_page=100)
    expected = in_one_step(runner, call, range(6))
    plan = builder()
    for each in (first, call, last):
        each.add_items(plan, each.add_context(plan, 0, len(each.context)), range(6))
    assert np.array_equal(read(runner, plan)[7:14], expected)
    for item in range(6):
        alone = builder()
        call.add_items(alone, call.cached(alone), [item])
        assert np.array_equal(read(runner, alone)[0], expected[1 + item])


def test_an_item_that_is_stored_has_the_bits_of_one_that_is_not(
    runner: ModelRunner, rng: np.random.Generator
) -> None:
    call = Call.random(rng, 205, 1, 0)
    item, context = call.items[0], len(call.context)
    expected = in_one_step(runner, call, [0])[1]
    full, own = context // PAGE, 300  # the context's full pages, and the first of the item's
    for step in (len(item), 1):
        found = expected[:0]
        for start in range(0, len(item), step):
            plan = builder()
            end = context + start + step
            table = pages(0, full * PAGE) + pages(own, end - full * PAGE)
            row = plan.prefill(plan.node(end, table), item[start : start + step])
            plan.gather(row + step - 1, LABELS)
            if start == 0:
                plan.copies += [full, own, context % PAGE]
            found = read(runner, plan)[0]
        assert np.array_equal(found, expected)


@dataclass(kw_only=True)
class Generation:
    """One sequence in slot 99, with others in the slots from 0 on."""

    prompts: list[list[int]]
    own: int  # which of them
    samplers: list[worker_pb2.Sampler]

    @classmethod
    def among(cls, prompt: list[int], sampler: worker_pb2.Sampler, others: int) -> "Generation":
        rng = np.random.default_rng(others)
        prompts = [tokens(rng, int(rng.integers(20, 90))) for _ in range(others)]
        samplers = [
            worker_pb2.Sampler(slot=i, temperature=(0.0, 0.9)[i % 2], top_p=0.9, top_k=9, seed=i)
            for i in range(others)
        ]
        own = others // 2
        return cls(
            prompts=[*prompts[:own], prompt, *prompts[own:]],
            own=own,
            samplers=[*samplers[:own], sampler, *samplers[own:]],
        )

    def run(self, runner: ModelRunner, steps: int, burst: int) -> list[tuple[int, float]]:
        found = self._take(runner, self.plan(0, 1))
        while len(found) < steps:
            found += self._take(runner, self.plan(len(found), min(burst, steps - len(found))))
        return found

    def plan(self, drawn: int, count: int) -> worker_pb2.StepPlan:
        plan, slots = builder(), np.full((count, len(self.prompts)), -1, np.int32)
        for i, (prompt, sampler) in enumerate(zip(self.prompts, self.samplers, strict=True)):
            length, first = len(prompt) + drawn, 10 + 12 * i if i != self.own else 700
            node = plan.node(length, pages(first, length + count - 1))
            row = plan.decode(node, -1 - sampler.slot) if drawn else plan.prefill(node, prompt)
            plan.sample(row if drawn else row + length - 1, sampler.slot, drawn)
            slots[:, i] = first * PAGE + length - 1 + np.arange(count)
        if not drawn:
            plan.samplers = self.samplers
            return plan.build()
        built = plan.build(drawn)
        built.kv_slots = blob(slots.ravel().tolist())
        if count > 1:
            built.repeat, built.row_steps = count, blob([count] * len(self.prompts))
        return built

    def _take(self, runner: ModelRunner, plan: worker_pb2.StepPlan) -> list[tuple[int, float]]:
        result = runner.step(plan)
        assert not result.error
        rows = (max(1, plan.repeat), len(self.prompts))
        chosen = decode_int32("", result.sampled_tokens).reshape(rows)[:, self.own]
        logprobs = decode_float32("", result.sampled_logprobs).reshape(rows)[:, self.own]
        return list(zip(chosen.tolist(), logprobs.tolist(), strict=True))


@pytest.mark.parametrize(
    "sampler",
    [
        worker_pb2.Sampler(slot=99, temperature=0.0, top_p=1.0),
        worker_pb2.Sampler(slot=99, temperature=0.8, top_p=0.9, top_k=20, seed=5),
        worker_pb2.Sampler(slot=99, temperature=0.7, top_p=1.0, seed=6, top_logprobs=3),
    ],
    ids=["greedy", "drawn", "read"],
)
def test_generations_do_not_depend_on_neighbours_or_on_bursts(
    runner: ModelRunner, rng: np.random.Generator, sampler: worker_pb2.Sampler
) -> None:
    prompt, steps = tokens(rng, 58), 20  # over the end of a step of 64 keys
    expected = Generation.among(prompt, sampler, 0).run(runner, steps, 1)
    for others, burst in ((0, 8), (5, 1), (40, 8), (51, 4)):
        found = Generation.among(prompt, sampler, others).run(runner, steps, burst)
        assert found == expected, (others, burst)


def test_decode_steps_of_a_gpu_run_by_graphs(runner: ModelRunner, rng: np.random.Generator) -> None:
    """At the start they were found to give the bits of a launch by launch."""
    if not runner.uses_gpu:
        pytest.skip("a CPU has no graphs")
    sampler = worker_pb2.Sampler(slot=99, temperature=0.0, top_p=1.0)
    generation = Generation.among(tokens(rng, 20), sampler, 5)
    generation.run(runner, 1, 1)
    for count in (1, 4):
        result = runner.step(generation.plan(1, count))
        assert [group.reason for group in result.groups] == ["graph"]
