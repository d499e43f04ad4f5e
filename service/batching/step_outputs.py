"""A step's result as arrays, checked against what the step asked for."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.plan_arrays import unpack_float32, unpack_int32
from stemserve.service.batching.step_builder import IssuedStep
from stemserve.service.errors import EngineFault
from stemserve.service.request import Float32, Int32, SampleToken

Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    step_id: int
    num_samples: int  # of each sub-step; the arrays of samples are [sub-steps * samples]
    gather_logprobs: Float32  # [ids]
    gather_argmax: Int32  # [gathers]
    gather_failed: Bool  # [gathers] logits were not finite
    class_scores: Float32  # [classified, classes]
    class_failed: Bool  # [classified]
    sampled_tokens: Int32  # [samples]
    sampled_logprobs: Float32  # [samples]
    sample_failed: Bool  # [samples]
    top_indptr: Int32  # [samples + 1]; empty: none
    top_ids: Int32
    top_logprobs: Float32

    def sample_token(self, at: int, sample: int, finish: str | None) -> SampleToken:
        first, end = self.top_indptr[at : at + 2].tolist() if len(self.top_indptr) else (0, 0)
        return SampleToken(
            sample=sample,
            token_id=int(self.sampled_tokens[at]),
            logprob=float(self.sampled_logprobs[at]),
            top_ids=tuple(self.top_ids[first:end].tolist()),
            top_logprobs=tuple(self.top_logprobs[first:end].tolist()),
            finish=finish,
        )


def read_outputs(
    issued: IssuedStep, result: worker_pb2.StepResult, num_classes: int
) -> StepOutputs:
    """Raises EngineFault where the result does not answer the step, never a wrong number."""
    if result.error:
        raise EngineFault(f"the worker failed in this step: {result.error}")
    failed = unpack_int32(result.failed_rows)
    scores = unpack_float32(result.class_scores)
    if len(scores) != len(issued.classify_rows) * num_classes:
        raise EngineFault(
            f"the worker answered {len(scores)} class_scores for "
            f"{len(issued.classify_rows)} rows of {num_classes} classes"
        )
    outputs = StepOutputs(
        step_id=issued.step_id,
        num_samples=len(issued.sample_rows) // issued.repeat,
        gather_logprobs=unpack_float32(result.gather_logprobs),
        gather_argmax=unpack_int32(result.gather_argmax),
        gather_failed=np.isin(issued.gather_rows, failed),
        class_scores=scores.reshape(len(issued.classify_rows), num_classes),
        class_failed=np.isin(issued.classify_rows, failed),
        sampled_tokens=unpack_int32(result.sampled_tokens),
        sampled_logprobs=unpack_float32(result.sampled_logprobs),
        sample_failed=np.isin(issued.sample_rows, failed),
        top_indptr=unpack_int32(result.top_indptr),
        top_ids=unpack_int32(result.top_ids),
        top_logprobs=unpack_float32(result.top_logprobs),
    )
    _check(issued, outputs)
    return outputs


def _check(issued: IssuedStep, outputs: StepOutputs) -> None:
    samples = len(issued.sample_rows)
    pairs = {
        "gather_logprobs": (len(outputs.gather_logprobs), issued.num_gather_ids),
        "gather_argmax": (len(outputs.gather_argmax), len(issued.gather_rows)),
        "sampled_tokens": (len(outputs.sampled_tokens), samples),
        "sampled_logprobs": (len(outputs.sampled_logprobs), samples),
        "top_logprobs": (len(outputs.top_logprobs), len(outputs.top_ids)),
    }
    if len(outputs.top_indptr):
        pairs["top_indptr"] = (len(outputs.top_indptr), samples + 1)
        pairs["top_ids"] = (len(outputs.top_ids), int(outputs.top_indptr[-1]))
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise EngineFault(f"the worker answered {found} {name} where {wanted} were asked for")
