"""Read-outs: log-probabilities over the full vocabulary, a bounded number of rows at a time."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.worker.plans import LIMITS, PlanBuilder
from tests.worker.tiny_model import CPU
from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.models.chunked_gather import ChunkedGather, rows_at_once
from stemserve.worker.models.layer_ops import Gathered
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Scorer, Scores, plan_readout
from stemserve.worker.steps.step import Step, decode_step

VOCAB = LIMITS.vocab_size
B28 = [2.0, 1.0, 0.0, -1.0]


@dataclass
class Table:
    """Heads whose logits are the hidden states themselves."""

    chunk: int
    rows_at_once: list[int] = field(default_factory=list[int])

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows_at_once.append(len(hidden))
        return hidden.clone()

    def gather(
        self, hidden: Tensor, rows: NDArray[np.integer], tokens: NDArray[np.integer]
    ) -> Gathered:
        return ChunkedGather(self.logits, self.chunk)(hidden, rows, tokens)

    def class_scores(self, hidden: Tensor) -> Tensor:
        return hidden[:, :3] * 2


def read(step: Step, logits: Tensor, buffer_bytes: int = 1 << 20) -> tuple[Scores, Table]:
    vocab = logits.shape[-1]
    heads = Table(chunk=rows_at_once(vocab, buffer_bytes))
    sampler = Sampler(LIMITS.sampler_slots, CPU)
    sampler.admit(step.samplers)
    scorer = Scorer(heads, sampler, vocab_size=vocab, device=CPU, buffer_bytes=buffer_bytes)
    readout = plan_readout(step)
    return scorer.read(step, readout, logits[device_tensor(readout.rows, CPU)]), heads


def prompt(rows: int) -> PlanBuilder:
    plan = PlanBuilder()
    plan.prefill(plan.node(rows, range(-(-rows // 4))), [1] * rows)
    return plan


def test_b28_log_probabilities_are_over_the_full_vocabulary() -> None:
    plan = prompt(2)
    plan.gather(1, [0, 2])
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0], B28])
    scores, _ = read(decode_step(plan.build(), LIMITS), logits)
    found = scores.gather_logprobs.numpy()
    assert found.tolist() == pytest.approx([-0.4402, -2.4402], abs=1e-4)
    assert np.exp(found).tolist() == pytest.approx([0.6439, 0.0871], abs=1e-4)
    assert scores.gather_argmax.numpy().tolist() == [0]


def random_plan(rng: np.random.Generator, rows: int) -> PlanBuilder:
    """Reads of all kinds, several at a row and out of order."""
    plan = prompt(rows)
    for _ in range(rng.integers(0, 20)):
        ids = rng.integers(0, VOCAB, rng.integers(0, 5)).tolist()
        plan.gather(int(rng.integers(rows)), ids)
    plan.classify = rng.integers(0, rows, rng.integers(0, 4)).tolist()
    for slot in rng.permutation(LIMITS.sampler_slots)[: rng.integers(0, 5)].tolist():
        plan.sample(int(rng.integers(rows)), slot, int(rng.integers(9)))
    for slot in range(LIMITS.sampler_slots):
        plan.samplers.append(sampler_of(slot))
    return plan


def sampler_of(slot: int) -> worker_pb2.Sampler:
    """Of three kinds: the likeliest token, a random one, none."""
    if slot % 3 == 2:
        return worker_pb2.Sampler(slot=slot, top_logprobs=3, reads_only=True)
    return worker_pb2.Sampler(slot=slot, temperature=slot % 3, seed=slot)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("seed", range(15))
def test_read_outs_equal_those_of_one_row_at_a_time(seed: int, chunk: int) -> None:
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, rows=30)
    step = decode_step(plan.build(), LIMITS)
    logits = device_tensor(rng.normal(0, 3, (30, VOCAB)).astype(np.float32), CPU)
    scores, heads = read(step, logits, buffer_bytes=4 * VOCAB * chunk)

    logprobs = logits.double().log_softmax(-1)
    expected = [float(logprobs[row, i]) for row, ids in plan.gathers for i in ids]
    assert scores.gather_logprobs.numpy().tolist() == pytest.approx(expected, abs=1e-5)
    argmax = [int(logits[row].argmax()) for row, _ in plan.gathers]
    assert scores.gather_argmax.numpy().tolist() == argmax
    assert torch.equal(scores.class_scores, logits[plan.classify][:, :3] * 2) or not plan.classify
    drawn = {int(s): i for some, d in scores.draws for i, s in zip(d.tokens, some, strict=True)}
    tops = {
        sample: ids
        for some, read_out in scores.draws
        for ids, sample in zip(read_out.top_ids, some.tolist(), strict=True)
    }
    assert sorted(drawn) == list(range(len(plan.samples)))
    for number, (row, slot, _) in enumerate(plan.samples):
        if slot % 3 == 0:
            assert drawn[number] == logits[row].argmax()
        elif slot % 3 == 2:
            assert drawn[number] == -1
            assert torch.equal(tops[number], logits[row].topk(3).indices)
    assert max(heads.rows_at_once, default=0) <= chunk
    gathered = {row for row, _ in plan.gathers}
    kinds = [{row for row, slot, _ in plan.samples if slot % 3 == kind} for kind in range(3)]
    assert sum(heads.rows_at_once) == len(gathered) + sum(map(len, kinds))


def test_rows_that_are_not_finite_are_reported_and_harm_no_other() -> None:
    plan = prompt(5)
    for row in range(5):
        plan.gather(row, [0, 3])
    plan.classify = [0, 4]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = logits.log_softmax(-1)[:, [0, 3]]
    logits[1, 7], logits[2, 7] = torch.nan, torch.inf
    logits[3, 7] = -torch.inf  # a token that cannot come is no failure
    logits[4, 1] = torch.nan
    scores, _ = read(decode_step(plan.build(), LIMITS), logits)
    assert scores.failed_gathered.numpy().tolist() == [False, True, True, False, True]
    assert scores.failed_classified.numpy().tolist() == [False, True]
    torch.testing.assert_close(scores.gather_logprobs.view(5, 2)[0], expected[0])


def test_a_step_that_reads_nothing_has_no_rows() -> None:
    scores, heads = read(decode_step(prompt(3).build(), LIMITS), torch.zeros(3, VOCAB))
    assert not heads.rows_at_once
    assert len(scores.gather_logprobs) == len(scores.gather_argmax) == len(scores.draws) == 0


def test_results_are_float32_whatever_the_model_is() -> None:
    scores, _ = read(decode_step(prompt(3).build(), LIMITS), torch.zeros(3, VOCAB).bfloat16())
    assert scores.class_scores.dtype == scores.gather_logprobs.dtype == torch.float32
