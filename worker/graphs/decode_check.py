"""Whether captured decode steps draw what the same steps draw launch by launch."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, encode_int32
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.warm_up import prompt_plan

# Products of other shapes round otherwise. The likeliest tokens of other rows differ by more.
MOST_DIFFERENCE = 0.1


class Steps(Protocol):
    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult: ...


def failures(
    captured: Steps,
    plain: Steps,
    rows: Sequence[int],  # numbers of rows
    limits: StepLimits,
    most_difference: float = MOST_DIFFERENCE,
) -> Mapping[int, str]:
    """What is wrong, by number of rows. Writes into page 0, which nobody has yet."""
    for runner in (captured, plain):
        runner.step(prompt_plan(limits))
    expected = _logprobs(plain.step(_same_rows(1, 0.0, limits)))[0]
    wrong: dict[int, str] = {}
    for count in rows:
        for temperature in (0.0, 1.0):
            result = captured.step(_same_rows(count, temperature, limits))
            apart = np.abs(_logprobs(result) - expected)
            if not apart.max() <= most_difference:  # or no number
                wrong[count] = f"log-probabilities differ by {apart.max():.2g}"
            elif [group.reason for group in result.groups] != ["graph"]:
                wrong[count] = "no graph took the step"
    return wrong


def _same_rows(rows: int, temperature: float, limits: StepLimits) -> worker_pb2.StepPlan:
    """The last token of the prompt, in every row again; random draws have but one token."""
    tokens = min(limits.page_size, limits.context_tokens, limits.max_step_tokens)
    plan = worker_pb2.StepPlan(
        token_ids=_repeated(0, rows),
        positions=_repeated(tokens - 1, rows),
        kv_slots=_repeated(-1, rows),
        segment_indptr=encode_int32(np.arange(rows + 1, dtype=np.int32)),
        segment_kind=_repeated(worker_pb2.SEGMENT_KIND_DECODE, rows),
        segment_node=_repeated(0, rows),
        segment_kernel=_repeated(0, rows),
        node_parent=_repeated(-1, 1),
        node_page_indptr=encode_int32(np.arange(2, dtype=np.int32)),
        node_pages=_repeated(0, 1),
        node_tokens=_repeated(tokens, 1),
        sample_rows=encode_int32(np.arange(rows, dtype=np.int32)),
        sample_slots=encode_int32(np.arange(rows, dtype=np.int32)),
        sample_index=_repeated(0, rows),
    )
    for slot in range(rows):
        plan.samplers.add(slot=slot, temperature=temperature, top_k=1, top_p=1.0)
    return plan


def _repeated(value: int, count: int) -> bytes:
    return encode_int32(np.full(count, value, np.int32))


def _logprobs(result: worker_pb2.StepResult) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return decode_float32("sampled_logprobs", result.sampled_logprobs)
