"""Draws for tests: samplers, their distributions in plain numpy, plans that read slots."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tests.worker.plans import PlanBuilder
from tests.worker.tiny_model import CPU
from torch import Tensor

from stemserve.kernels.layout import int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.sampling.params import TokenMask, decode_masks, decode_sampler
from stemserve.worker.sampling.sampler import Drawn, Sampler
from stemserve.worker.steps.reads import Samples

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


def decode_plan(slot: int) -> PlanBuilder:
    plan = PlanBuilder()
    plan.sample(plan.decode(plan.node(3, [0]), -1 - slot), slot)
    return plan


def mask_of(slot: int, ids: NDArray[np.integer], vocab: int, *, as_ids: bool = False) -> TokenMask:
    if as_ids:
        blob = np.sort(ids).astype("<i4").tobytes()
        message = worker_pb2.TokenMask(slot=slot, allowed_ids=blob)
        return decode_masks([message], vocab_size=vocab)[0]
    flags = np.zeros(vocab, np.bool_)
    flags[ids] = True
    bits = np.packbits(flags, bitorder="little").tobytes()
    return decode_masks([worker_pb2.TokenMask(slot=slot, allowed=bits)], vocab_size=vocab)[0]
