"""The largest steps that a worker may be given, to find out what they take."""

from collections.abc import Iterator, Sequence

import numpy as np

from stemserve.kernels.layout import Int32, int32
from stemserve.kernels.token_sources import indptr, runs
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import encode_int32
from stemserve.worker.steps.checks import StepLimits

ITEM_ROWS = 64
TOP_LOGPROBS = 20


def trial_pages(limits: StepLimits) -> int:
    """KV pages that the steps need."""
    size, lengths = limits.page_size, _prompt_lengths(limits)
    prompts = int((-(-lengths // size)).sum())
    return max(prompts, -(-_prefix_tokens(limits) // size), _decode_rows(limits))


def trial_steps(limits: StepLimits) -> Iterator[worker_pb2.StepPlan]:
    """They read pages that nobody has written."""
    yield prompt_step(limits, _prompt_lengths(limits))
    if limits.context_tokens > 1:
        yield _item_step(limits)
    if limits.has_lm_head:
        yield _decode_step(limits)


def prompt_step(
    limits: StepLimits,
    lengths: Int32,  # [prompts] tokens
) -> worker_pb2.StepPlan:
    """Prompts of some lengths, each from page boundary to page boundary; every row is read."""
    pages = int32(-(-lengths // limits.page_size))
    first_page = int32(np.cumsum(pages) - pages)
    positions = runs(np.zeros_like(lengths), lengths)
    prompts = len(lengths)
    plan = worker_pb2.StepPlan(
        token_ids=_packed([0] * len(positions)),
        positions=_packed(positions),
        kv_slots=_packed(int32(np.repeat(first_page * limits.page_size, lengths) + positions)),
        segment_indptr=_packed(indptr(lengths)),
        segment_kind=_packed([worker_pb2.SEGMENT_KIND_PREFILL] * prompts),
        segment_node=_packed(range(prompts)),
        segment_kernel=_packed([0] * prompts),
        node_parent=_packed([-1] * prompts),
        node_page_indptr=_packed(indptr(pages)),
        node_pages=_packed(range(int(pages.sum()))),
        node_tokens=_packed(lengths),
    )
    _read_rows(plan, limits)
    return plan


def _item_step(limits: StepLimits) -> worker_pb2.StepPlan:
    """Items behind one long prefix."""
    prefix, rows = _prefix_tokens(limits), limits.max_step_tokens
    longest = min(ITEM_ROWS, limits.context_tokens - prefix)
    lengths = _cut(rows, longest)
    items = len(lengths)
    pages = -(-prefix // limits.page_size)
    plan = worker_pb2.StepPlan(
        token_ids=_packed([0] * rows),
        positions=_packed(int32(np.arange(rows) % longest + prefix)),
        kv_slots=_packed([-1] * rows),
        segment_indptr=_packed(indptr(lengths)),
        segment_kind=_packed([worker_pb2.SEGMENT_KIND_ITEM] * items),
        segment_node=_packed([0] * items),
        segment_kernel=_packed([0] * items),
        node_parent=_packed([-1]),
        node_page_indptr=_packed([0, pages]),
        node_pages=_packed(range(pages)),
        node_tokens=_packed([prefix]),
    )
    _read_rows(plan, limits)
    return plan


def _decode_step(limits: StepLimits) -> worker_pb2.StepPlan:
    """A random sample in each slot, with the most likely tokens beside."""
    rows = _decode_rows(limits)
    plan = prompt_step(limits, int32([1] * rows))
    plan.segment_kind = _packed([worker_pb2.SEGMENT_KIND_DECODE] * rows)
    plan.sample_rows = plan.sample_slots = _packed(range(rows))
    plan.sample_index = _packed([0] * rows)
    top = min(TOP_LOGPROBS, limits.vocab_size)
    for slot in range(rows):
        plan.samplers.add(
            slot=slot, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=slot, top_logprobs=top
        )
    return plan


def _read_rows(plan: worker_pb2.StepPlan, limits: StepLimits) -> None:
    rows = len(plan.positions) // 4
    if limits.has_lm_head:
        plan.gather_rows = _packed(range(rows))
        plan.gather_indptr = _packed(range(rows + 1))
        plan.gather_ids = _packed([0] * rows)
    if limits.classes:
        plan.classify_rows = _packed(range(rows))


def _prompt_lengths(limits: StepLimits) -> Int32:
    return _cut(limits.max_step_tokens, limits.context_tokens)


def _prefix_tokens(limits: StepLimits) -> int:
    """Of the items' step."""
    longest = limits.context_tokens - min(ITEM_ROWS, max(1, limits.context_tokens // 2))
    return max(1, min(longest, limits.max_step_tokens))


def _decode_rows(limits: StepLimits) -> int:
    return min(limits.sampler_slots, limits.max_step_tokens)


def _cut(total: int, longest: int) -> Int32:
    """A number as a sum of `longest` and a rest."""
    rest = total % longest
    return int32([longest] * (total // longest) + [rest] * (rest > 0))


def _packed(values: Sequence[int] | Int32) -> bytes:
    return encode_int32(np.asarray(values, np.int32))
