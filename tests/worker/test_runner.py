"""Steps of a small model, against transformers with one sequence at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.plans import PlanBuilder
from tests.worker.tiny_model import (
    CPU,
    VOCAB,
    TinyRunner,
    make_runner,
    oracle_logprobs,
    save_tiny_model,
)
from torch import Tensor
from transformers import LlamaForCausalLM

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import Int32
from stemserve.kernels.strategy import Kernel
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_float32, decode_int32
from stemserve.worker.choice.dispatch import KERNEL_CODES

TOLERANCE = 1e-4
PREFIX_TOKENS = 37  # nine pages of four and one token
FULL_PAGES = range(9)
TAIL_PAGE = 9
ITEM_LENGTHS = (1, 5, 2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LlamaForCausalLM:
    return save_tiny_model(folder, seed=11)


def random_tokens(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return tokens


def logprobs(result: worker_pb2.StepResult) -> Tensor:
    return device_tensor(decode_float32("gather_logprobs", result.gather_logprobs), CPU)


def tokens(result: worker_pb2.StepResult) -> Int32:
    return decode_int32("sampled_tokens", result.sampled_tokens)


class Story:
    """A prefix in chunks; items, samples and strangers beside it; its tail copied for samples."""

    def __init__(self, tiny: TinyRunner, seed: int) -> None:
        self.tiny = tiny
        self.prefix = random_tokens(seed, PREFIX_TOKENS)
        self.items = [random_tokens(seed + 1 + i, n) for i, n in enumerate(ITEM_LENGTHS)]
        self.stranger = random_tokens(seed + 10, 9)
        self.samples: list[list[int]] = [[], [], []]
        self.sample_logprobs: list[list[float]] = [[], [], []]
        self.groups: list[worker_pb2.GroupReport] = []

    def step(self, plan: PlanBuilder) -> worker_pb2.StepResult:
        result = self.tiny.runner.step(plan.build())
        assert not result.failed_rows
        self.groups += result.groups
        for (_, slot, _), token, logprob in zip(
            plan.samples,
            tokens(result).tolist(),
            decode_float32("", result.sampled_logprobs).tolist(),
            strict=True,
        ):
            self.samples[slot].append(token)
            self.sample_logprobs[slot].append(logprob)
        return result

    def prefill_all_but_the_last_chunk(self) -> None:
        for start, end in ((0, 13), (13, 30)):
            plan = PlanBuilder()
            plan.prefill(plan.node(end, range(-(-end // 4))), self.prefix[start:end])
            self.step(plan)

    def finish_prefix(self) -> worker_pb2.StepResult:
        """The last chunk, its items, the first tokens of three samples and a stranger."""
        plan = PlanBuilder()
        tail = plan.node(1, [TAIL_PAGE], plan.node(36, FULL_PAGES))
        other = plan.node(9, [30, 32, 31])
        last = plan.prefill(tail, self.prefix[30:]) + 6
        item_rows = [plan.item(tail, item) for item in self.items]
        alone = plan.item(-1, self.items[1])
        stranger = plan.prefill(other, self.stranger)
        for item, first in zip(self.items, item_rows, strict=True):
            plan.gather(last, item[:1])
            for i, token in enumerate(item[1:]):
                plan.gather(first + i, [token])
        plan.gather(alone + 1, [5])
        plan.gather(stranger + 8, range(VOCAB))
        for slot in range(3):
            plan.sample(last, slot)
            plan.samplers.append(
                worker_pb2.Sampler(slot=slot, temperature=float(slot > 0), top_p=1, seed=slot)
            )
        return self.step(plan)

    def decode(self, index: int) -> None:
        """Token `index` of each sample; the first copies the tail, the fourth needs a new page."""
        plan = PlanBuilder()
        root = plan.node(36, FULL_PAGES)
        for slot in range(3):
            stored = 1 + index
            tail = plan.node(stored, [40 + 10 * slot, 41 + 10 * slot][: -(-stored // 4)], root)
            plan.sample(plan.decode(tail, -1 - slot), slot, index)
            if index == 1:
                plan.copies += [TAIL_PAGE, 40 + 10 * slot, 1]
        self.step(plan)

    def run_last_row_again(self) -> worker_pb2.StepResult:
        plan = PlanBuilder()
        tail = plan.node(1, [TAIL_PAGE], plan.node(36, FULL_PAGES))
        row = plan.prefill(tail, self.prefix[-1:], stored=False)
        plan.gather(row, range(VOCAB))
        return self.step(plan)


def item_logprobs(story: Story, oracle: LlamaForCausalLM) -> Tensor:
    expected: list[Tensor] = []
    for item in story.items:
        rows = oracle_logprobs(oracle, story.prefix + item)[PREFIX_TOKENS - 1 : -1]
        expected.append(rows.gather(-1, torch.tensor(item)[:, None]).squeeze(-1))
    return torch.cat(expected)


@pytest.mark.parametrize("forced", [None, *Kernel])
@pytest.mark.parametrize("device", DEVICES)
def test_every_strategy_agrees_with_transformers(
    folder: Path, oracle: LlamaForCausalLM, forced: Kernel | None, device: str
) -> None:
    runner = make_runner(folder, forced=forced, device=torch.device(device))
    story = Story(runner, seed=100)
    story.prefill_all_but_the_last_chunk()
    first = story.finish_prefix()
    for index in range(1, 6):
        story.decode(index)
    again = logprobs(story.run_last_row_again())

    count = sum(ITEM_LENGTHS)
    torch.testing.assert_close(
        logprobs(first)[:count], item_logprobs(story, oracle), rtol=0, atol=TOLERANCE
    )
    alone = oracle_logprobs(oracle, story.items[1])[1, 5]
    assert abs(float(logprobs(first)[count] - alone)) < TOLERANCE
    stranger = oracle_logprobs(oracle, story.stranger)[-1]
    torch.testing.assert_close(logprobs(first)[count + 1 :], stranger, rtol=0, atol=TOLERANCE)
    last = oracle_logprobs(oracle, story.prefix)[-1]
    torch.testing.assert_close(again, last, rtol=0, atol=TOLERANCE)
    argmax = decode_int32("", first.gather_argmax)
    assert argmax[0] == last.argmax() and argmax[-1] == stranger.argmax()
    for sample, drawn in zip(story.samples, story.sample_logprobs, strict=True):
        rows = oracle_logprobs(oracle, story.prefix + sample)[PREFIX_TOKENS - 1 : -1]
        expected = rows.gather(-1, torch.tensor(sample)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(drawn), expected, rtol=0, atol=TOLERANCE)
        if sample is story.samples[0]:
            assert sample == rows.argmax(-1).numpy().tolist()
    assert story.samples[1] != story.samples[2]


@pytest.mark.parametrize("forced", [*Kernel])
def test_a_forced_strategy_runs_wherever_its_phase_is(folder: Path, forced: Kernel) -> None:
    story = Story(make_runner(folder, forced=forced), seed=7)
    story.prefill_all_but_the_last_chunk()
    story.finish_prefix()
    story.decode(1)
    phases = {
        Kernel.PAGED: {"decode"},
        Kernel.CODEC: {"decode"},
        Kernel.CASCADE: {"prefill", "decode"},
    }.get(forced, {"prefill"})
    for report in story.groups:
        expected = "forced" if report.phase in phases else "cost_model"
        assert report.reason == expected
        assert (report.kernel == KERNEL_CODES[forced]) or report.phase not in phases


def test_shared_prefixes_are_read_once_and_counted(folder: Path) -> None:
    story = Story(make_runner(folder, forced=Kernel.CASCADE), seed=7)
    story.prefill_all_but_the_last_chunk()
    story.finish_prefix()
    story.groups.clear()
    story.decode(1)
    (report,) = story.groups
    token_bytes = story.tiny.pool.shape.bytes_per_token
    assert report.kv_read_bytes == (36 + 3 * 2) * token_bytes
    assert report.kv_avoided_bytes == 2 * 36 * token_bytes
    assert (report.rows, report.segments, report.phase) == (3, 3, "decode")
    assert report.actual_seconds > 0 and report.predicted_seconds > 0


def test_what_a_page_held_before_does_not_matter(folder: Path) -> None:
    clean = Story(make_runner(folder), seed=31)
    dirty = Story(make_runner(folder), seed=31)
    dirty.tiny.pool.poison(np.arange(128, dtype=np.int32))
    results: list[Tensor] = []
    for story in (clean, dirty):
        story.prefill_all_but_the_last_chunk()
        first = story.finish_prefix()
        for index in range(1, 5):
            story.decode(index)
        results.append(torch.cat([logprobs(first), logprobs(story.run_last_row_again())]))
    assert torch.equal(*results)
    assert clean.samples == dirty.samples


def test_a_bad_plan_changes_nothing(folder: Path, oracle: LlamaForCausalLM) -> None:
    story = Story(make_runner(folder), seed=5)
    story.prefill_all_but_the_last_chunk()
    story.finish_prefix()
    plan = PlanBuilder()
    plan.prefill(plan.node(1, [TAIL_PAGE], plan.node(36, FULL_PAGES)), [1])
    plan.sample(0, slot=7)  # no such sampler
    with pytest.raises(BadPlan, match="slot 7"):
        story.tiny.runner.step(plan.build())
    again = logprobs(story.run_last_row_again())
    expected = oracle_logprobs(oracle, story.prefix)[-1]
    torch.testing.assert_close(again, expected, rtol=0, atol=TOLERANCE)


def test_a_step_may_read_nothing(folder: Path) -> None:
    plan = PlanBuilder()
    plan.prefill(plan.node(3, [0]), [1, 2, 3])
    result = make_runner(folder).runner.step(plan.build(step_id=12))
    assert result.step_id == 12
    assert not (result.gather_logprobs or result.sampled_tokens or result.failed_rows)


def test_predict_prices_every_strategy_and_runs_nothing(folder: Path) -> None:
    tiny = make_runner(folder)
    plan = PlanBuilder()
    root = plan.node(36, FULL_PAGES)
    plan.decode(plan.node(1, [10], root), 1)
    plan.decode(plan.node(1, [11], root), 1)
    plan.item(root, [1, 2])
    prediction = tiny.runner.predict(plan.build())
    assert tiny.pool.k_pages(0).count_nonzero() == 0
    by_phase = {group.phase: group for group in prediction.groups}
    assert by_phase.keys() == {"decode", "prefill"}
    decode = by_phase["decode"]
    kernels = {strategy.kernel for strategy in decode.strategies}
    assert kernels == {KERNEL_CODES[k] for k in (Kernel.PAGED, Kernel.CASCADE, Kernel.CODEC)}
    assert decode.chosen == decode.strategies[0].kernel
    assert len(by_phase["prefill"].strategies) == 6
    assert (decode.rows, decode.segments) == (2, 2)
