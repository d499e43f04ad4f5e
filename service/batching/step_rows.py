"""The rows of a step in segments, and the forest of stored KV above them."""

from typing import NamedTuple

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.plan_arrays import indptr_of, join_int32, pack_int32
from stemserve.service.batching.prefix_forest import StoredChain, build_forest
from stemserve.service.request import Int32


class _Segments(NamedTuple):
    """Segments that follow one another, with one chain (or none) above all of them."""

    tokens: Int32
    positions: Int32
    kv_slots: Int32
    lengths: Int32
    kind: int
    kernel: int
    chain: StoredChain | None


class _DecodeRow(NamedTuple):
    token: int
    position: int
    steps: int
    kernel: int


class StepRows:
    """Decode rows are added before all others, so a row has its number at once."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.repeat = 1  # the most steps of a decode row; more than 1: a burst, of such rows only
        self._decode_slots: list[Int32] = []
        self._decodes: list[_DecodeRow] = []
        self._decode_chains: list[StoredChain] = []
        self._segments: list[_Segments] = []

    @property
    def num_decodes(self) -> int:
        return len(self._decodes)

    def add_decode(self, token: int, kv_slots: Int32, chain: StoredChain, kernel: int) -> int:
        """Add the tokens of a chain, as long as it will be, that go to `kv_slots`; returns the row.

        They are as many as the steps of the burst in which the row counts; only the first is known.
        """
        steps = len(kv_slots)
        self.repeat = max(self.repeat, steps)
        self._decodes.append(_DecodeRow(token, chain.tokens - steps, steps, kernel))
        self._decode_slots.append(kv_slots)
        self._decode_chains.append(chain)
        self.num_rows += 1
        return self.num_rows - 1

    def add_prefill(self, tokens: Int32, kv_slots: Int32, chain: StoredChain, kernel: int) -> int:
        """Add the last tokens of a chain; returns the first row."""
        positions = np.arange(chain.tokens - len(tokens), chain.tokens, dtype=np.int32)
        length = np.array([len(tokens)], np.int32)
        kind = worker_pb2.SEGMENT_KIND_PREFILL
        return self._add(_Segments(tokens, positions, kv_slots, length, kind, kernel, chain))

    def add_items(
        self, tokens: Int32, offsets: Int32, lengths: Int32, chain: StoredChain | None, kernel: int
    ) -> int:
        """Add items behind one chain; returns the first row. Offsets count inside the items."""
        positions = offsets + np.int32(0 if chain is None else chain.tokens)
        slots = np.full(len(tokens), -1, np.int32)
        kind = worker_pb2.SEGMENT_KIND_ITEM
        return self._add(_Segments(tokens, positions, slots, lengths, kind, kernel, chain))

    def write(self, plan: worker_pb2.StepPlan, page_size: int) -> None:
        segments = self._decode_segments() + self._segments
        if self.repeat > 1:
            plan.repeat = self.repeat
            plan.row_steps = pack_int32([row.steps for row in self._decodes])
        plan.token_ids = pack_int32(join_int32([s.tokens for s in segments]))
        plan.positions = pack_int32(join_int32([s.positions for s in segments]))
        plan.kv_slots = pack_int32(join_int32([s.kv_slots for s in segments]))
        plan.segment_indptr = pack_int32(indptr_of(join_int32([s.lengths for s in segments])))
        counts = np.array([len(s.lengths) for s in segments], np.int32)
        plan.segment_kind = pack_int32(np.repeat([s.kind for s in segments], counts))
        kernels = [np.array([row.kernel for row in self._decodes], np.int32)]
        kernels += [np.full(len(s.lengths), s.kernel, np.int32) for s in self._segments]
        plan.segment_kernel = pack_int32(join_int32(kernels))
        self._write_forest(plan, page_size)

    def _add(self, segments: _Segments) -> int:
        first = self.num_rows
        self._segments.append(segments)
        self.num_rows += len(segments.tokens)
        return first

    def _decode_segments(self) -> list[_Segments]:
        if not self._decodes:
            return []
        rows = np.array(self._decodes, np.int32)
        ones = np.ones(len(rows), np.int32)
        kind = worker_pb2.SEGMENT_KIND_DECODE
        return [_Segments(rows[:, 0], rows[:, 1], self._slots_by_step(), ones, kind, 0, None)]

    def _slots_by_step(self) -> Int32:
        """[repeat * rows] -1: the row counts no more."""
        if self.repeat == 1:
            return join_int32(self._decode_slots)
        slots = np.full((len(self._decodes), self.repeat), -1, np.int32)
        for row, known in enumerate(self._decode_slots):
            slots[row, : len(known)] = known
        return slots.T.ravel()

    def _write_forest(self, plan: worker_pb2.StepPlan, page_size: int) -> None:
        stored = [s.chain for s in self._segments if s.chain is not None]
        forest = build_forest(self._decode_chains + stored, page_size)
        plan.node_parent = pack_int32(forest.node_parent)
        plan.node_page_indptr = pack_int32(forest.node_page_indptr)
        plan.node_pages = pack_int32(forest.node_pages)
        if self.repeat > 1:  # each row has a leaf of its own
            ahead = np.array([row.steps - 1 for row in self._decodes], np.int32)
            forest.node_tokens[forest.chain_node] -= ahead
        plan.node_tokens = pack_int32(forest.node_tokens)
        num_decodes = len(self._decode_chains)
        nodes = [forest.chain_node[:num_decodes]]
        chain_nodes = iter(forest.chain_node[num_decodes:].tolist())
        for segments in self._segments:
            node = -1 if segments.chain is None else next(chain_nodes)
            nodes.append(np.full(len(segments.lengths), node, np.int32))
        plan.segment_node = pack_int32(join_int32(nodes))
