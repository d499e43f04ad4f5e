"""Whether captured pieces give what the same steps give launch by launch."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, encode_int32
from stemserve.worker.memory.trial_steps import prompt_step
from stemserve.worker.steps.checks import StepLimits

PROMPTS = 5
ROWS = (40, 700)
# Products of other shapes round otherwise. Log-probabilities of any tokens differ by more.
MOST_DIFFERENCE = 0.3


def check_steps(limits: StepLimits) -> Iterator[worker_pb2.StepPlan]:
    """Prompts in the first pages, which nobody has yet, with something read at their ends."""
    rng = np.random.default_rng(0)
    for rows in ROWS:
        longest = min(limits.context_tokens, limits.max_step_tokens // PROMPTS)
        longest = min(longest, limits.kv_pages // PROMPTS * limits.page_size, rows // PROMPTS)
        if longest < 1:
            continue
        lengths = int32(np.maximum(1, longest - np.arange(PROMPTS)))
        plan = prompt_step(limits, lengths)
        ends = np.cumsum(lengths) - 1
        tokens = rng.integers(0, limits.vocab_size, (int(lengths.sum())))
        plan.token_ids = encode_int32(int32(tokens))
        if limits.has_lm_head:
            plan.gather_rows = encode_int32(int32(ends))
            plan.gather_indptr = encode_int32(int32(2 * np.arange(PROMPTS + 1)))
            ids = rng.integers(0, limits.vocab_size, 2 * PROMPTS)
            plan.gather_ids = encode_int32(int32(ids))
        if limits.classes:
            plan.classify_rows = encode_int32(int32(ends))
        yield plan


def difference(found: worker_pb2.StepResult, expected: worker_pb2.StepResult) -> float:
    """Mean of log-probabilities and scores."""
    apart = np.abs(_numbers(found) - _numbers(expected))
    return float(apart.mean()) if len(apart) and np.isfinite(apart).all() else np.inf


def _numbers(result: worker_pb2.StepResult) -> NDArray[np.float32]:
    logprobs = decode_float32("gather_logprobs", result.gather_logprobs)
    return np.concatenate([logprobs, decode_float32("class_scores", result.class_scores)])
