"""Builds StepPlans for tests: positions and slots follow from the chains."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import encode_int32
from stemserve.worker.steps.checks import StepLimits

PAGE_SIZE = 4

LIMITS = StepLimits(
    vocab_size=50,
    context_tokens=64,
    page_size=PAGE_SIZE,
    kv_pages=32,
    sampler_slots=4,
    max_step_tokens=40,
    has_lm_head=True,
    classes=3,
)


def blob(values: Sequence[int]) -> bytes:
    return encode_int32(np.asarray(values, np.int32))


@dataclass(kw_only=True)
class PlanBuilder:
    """Nodes in depth-first order; each method that adds rows returns the first."""

    page_size: int = PAGE_SIZE
    parents: list[int] = field(default_factory=list[int])
    pages: list[list[int]] = field(default_factory=list[list[int]])
    tokens: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    kv_slots: list[int] = field(default_factory=list[int])
    indptr: list[int] = field(default_factory=lambda: [0])
    kinds: list[int] = field(default_factory=list[int])
    nodes: list[int] = field(default_factory=list[int])
    kernels: list[int] = field(default_factory=list[int])
    copies: list[int] = field(default_factory=list[int])
    gathers: list[tuple[int, Sequence[int]]] = field(
        default_factory=list[tuple[int, Sequence[int]]]
    )
    classify: list[int] = field(default_factory=list[int])
    samples: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    samplers: list[worker_pb2.Sampler] = field(default_factory=list[worker_pb2.Sampler])

    def node(self, tokens: int, pages: Sequence[int], parent: int = -1) -> int:
        self.parents.append(parent)
        self.pages.append(list(pages))
        self.tokens.append(tokens)
        return len(self.parents) - 1

    def chain_tokens(self, node: int) -> int:
        return self.tokens[node] + self.chain_tokens(self.parents[node]) if node >= 0 else 0

    def block_table(self, node: int) -> list[int]:
        return self.block_table(self.parents[node]) + self.pages[node] if node >= 0 else []

    def prefill(
        self, node: int, token_ids: Sequence[int], *, stored: bool = True, kernel: int = 0
    ) -> int:
        return self._stored(worker_pb2.SEGMENT_KIND_PREFILL, node, token_ids, stored, kernel)

    def decode(self, node: int, token_id: int, *, kernel: int = 0) -> int:
        return self._stored(worker_pb2.SEGMENT_KIND_DECODE, node, [token_id], True, kernel)

    def item(self, node: int, token_ids: Sequence[int], *, kernel: int = 0) -> int:
        start = self.chain_tokens(node)
        slots = [-1] * len(token_ids)
        return self._segment(worker_pb2.SEGMENT_KIND_ITEM, node, kernel, token_ids, start, slots)

    def sample(self, row: int, slot: int, index: int = 0) -> None:
        self.samples.append((row, slot, index))

    def gather(self, row: int, ids: Sequence[int]) -> None:
        self.gathers.append((row, ids))

    def build(self, step_id: int = 1) -> worker_pb2.StepPlan:
        return worker_pb2.StepPlan(
            step_id=step_id,
            token_ids=blob(self.token_ids),
            positions=blob(self.positions),
            kv_slots=blob(self.kv_slots),
            segment_indptr=blob(self.indptr),
            segment_kind=blob(self.kinds),
            segment_node=blob(self.nodes),
            segment_kernel=blob(self.kernels),
            node_parent=blob(self.parents),
            node_page_indptr=blob(_indptr(self.pages)),
            node_pages=blob([page for pages in self.pages for page in pages]),
            node_tokens=blob(self.tokens),
            copies=blob(self.copies),
            gather_rows=blob([row for row, _ in self.gathers]),
            gather_indptr=blob(_indptr([ids for _, ids in self.gathers])),
            gather_ids=blob([i for _, ids in self.gathers for i in ids]),
            classify_rows=blob(self.classify),
            sample_rows=blob([row for row, _, _ in self.samples]),
            sample_slots=blob([slot for _, slot, _ in self.samples]),
            sample_index=blob([index for _, _, index in self.samples]),
            samplers=self.samplers,
        )

    def _stored(
        self, kind: int, node: int, token_ids: Sequence[int], stored: bool, kernel: int
    ) -> int:
        start = self.chain_tokens(node) - len(token_ids)
        table = self.block_table(node)
        slots = [
            table[i // self.page_size] * self.page_size + i % self.page_size if stored else -1
            for i in range(start, start + len(token_ids))
        ]
        return self._segment(kind, node, kernel, token_ids, start, slots)

    def _segment(
        self,
        kind: int,
        node: int,
        kernel: int,
        token_ids: Sequence[int],
        start: int,
        slots: Sequence[int],
    ) -> int:
        first = len(self.token_ids)
        self.token_ids += token_ids
        self.positions += range(start, start + len(token_ids))
        self.kv_slots += slots
        self.indptr.append(len(self.token_ids))
        self.kinds.append(kind)
        self.nodes.append(node)
        self.kernels.append(kernel)
        return first


def _indptr(slices: Sequence[Sequence[int]]) -> list[int]:
    return [0, *np.cumsum([len(s) for s in slices], dtype=int).tolist()]
