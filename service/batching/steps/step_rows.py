"""The rows of a step in segments, and the forest of stored KV above them."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.beam_rows import BeamRows
from stemserve.service.batching.steps.plan_arrays import (
    indptr_of,
    join_int32,
    pack_int32,
    pack_parts,
    repeated_int32,
)
from stemserve.service.batching.steps.prefix_forest import (
    ForestMemory,
    PrefixForest,
    StoredChain,
    are_one,
)
from stemserve.service.request import Int32

DECODE = worker_pb2.SEGMENT_KIND_DECODE


class PagedSequence(Protocol):
    """A sequence that goes on in pages of its own."""

    @property
    def table(self) -> Int32: ...

    @property
    def own_key(self) -> bytes:
        """Pages up to the first of its own, as bytes."""
        ...


class _Segments(NamedTuple):
    """Segments that follow one another, with one chain (or none) above all of them."""

    tokens: Int32
    positions: Int32
    kv_slots: Int32
    lengths: Int32
    kind: int
    kernel: int
    chain: StoredChain | None


class _Decodes:
    """Rows of one token each; of a burst, the first of some that follow one another."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []  # behind the last
        self.kernels: list[int] = []
        self.pages: list[list[int]] = []  # that the row's tokens go to
        self.branches: list[PagedSequence | BeamRows] = []  # of one row, or of some

    @property
    def steps(self) -> Int32:
        return np.array(self.ends, np.int32) - np.array(self.starts, np.int32)

    @property
    def chains(self) -> list[StoredChain]:
        """As long as they will be."""
        chains: list[StoredChain] = []
        for branch in self.branches:
            if isinstance(branch, BeamRows):
                chains += branch.chains
            else:
                end = self.ends[len(chains)]
                chains.append(StoredChain(branch.table, end, branch.own_key))
        return chains

    def add_beams(self, tokens: Sequence[int], beams: BeamRows, kernel: int) -> None:
        rows, end = len(tokens), beams.tokens
        self.tokens += tokens
        self.starts += [end - 1] * rows
        self.ends += [end] * rows
        self.kernels += [kernel] * rows
        self.pages += [[page] for page in beams.last_pages]
        self.branches.append(beams)

    def slots(self, repeat: int, page_size: int) -> Int32:
        """[repeat * rows] -1: the row counts no more."""
        starts = np.array(self.starts, np.int32)
        pages = np.array(list(chain.from_iterable(self.pages)), np.int32)
        if repeat == 1:
            return pages * page_size + starts % page_size
        first = indptr_of(np.array([len(p) for p in self.pages], np.int32))[:-1]
        sub_step = np.arange(repeat, dtype=np.int32)[:, None]
        counts = sub_step < self.steps
        at, offset = np.divmod(starts % page_size + sub_step, page_size)
        slots = pages[np.where(counts, first + at, 0)] * page_size + offset
        return np.where(counts, slots, -1).ravel()


class StepRows:
    """Decode rows are added before all others, so a row has its number at once."""

    def __init__(self, page_size: int, forests: ForestMemory) -> None:
        self.num_rows = 0
        self.repeat = 1  # the most steps of a decode row; more than 1: a burst, of such rows only
        self._page_size = page_size
        self._forests = forests
        self._decodes = _Decodes()
        self._segments: list[_Segments] = []

    @property
    def num_decodes(self) -> int:
        return len(self._decodes.tokens)

    def add_decode(
        self, token: int, start: int, end: int, branch: PagedSequence, kernel: int
    ) -> int:
        """Add a row at position `start` of a branch that has pages up to `end`; in a burst it goes
        on through the positions before that. Returns the row."""
        size, decodes = self._page_size, self._decodes
        decodes.tokens.append(token)
        decodes.starts.append(start)
        decodes.ends.append(end)
        decodes.kernels.append(kernel)
        decodes.pages.append(branch.table[start // size : (end - 1) // size + 1].tolist())
        decodes.branches.append(branch)
        if end - start > self.repeat:
            self.repeat = end - start
        self.num_rows += 1
        return self.num_rows - 1

    def add_beams(self, tokens: Sequence[int], beams: BeamRows, kernel: int) -> range:
        """Add a row for the last token of each beam; returns the rows."""
        first = self.num_rows
        self._decodes.add_beams(tokens, beams, kernel)
        self.num_rows += len(tokens)
        return range(first, self.num_rows)

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
        slots = np.empty(len(tokens), np.int32)
        slots.fill(-1)
        kind = worker_pb2.SEGMENT_KIND_ITEM
        return self._add(_Segments(tokens, positions, slots, lengths, kind, kernel, chain))

    def write(self, plan: worker_pb2.StepPlan) -> None:
        branches = self._decodes.branches
        if len(branches) == 1 and isinstance(branches[0], BeamRows) and not self._segments:
            self._write_beams(plan, branches[0])
            return
        if self.repeat > 1:
            plan.repeat = self.repeat
            plan.row_steps = pack_int32(self._decodes.steps)
        segments = self._decode_segments() + self._segments
        plan.token_ids = pack_parts([s.tokens for s in segments])
        plan.positions = pack_parts([s.positions for s in segments])
        plan.kv_slots = pack_parts([s.kv_slots for s in segments])
        plan.segment_indptr = pack_int32(indptr_of(join_int32([s.lengths for s in segments])))
        plan.segment_kind = b"".join(repeated_int32(s.kind, len(s.lengths)) for s in segments)
        plan.segment_kernel = pack_int32(self._decodes.kernels) + b"".join(
            repeated_int32(s.kernel, len(s.lengths)) for s in self._segments
        )
        self._write_forest(plan)

    def _add(self, segments: _Segments) -> int:
        first = self.num_rows
        self._segments.append(segments)
        self.num_rows += len(segments.tokens)
        return first

    def _decode_segments(self) -> list[_Segments]:
        decodes, rows = self._decodes, self.num_decodes
        if not rows:
            return []
        return [
            _Segments(
                tokens=np.array(decodes.tokens, np.int32),
                positions=np.array(decodes.starts, np.int32),
                kv_slots=decodes.slots(self.repeat, self._page_size),
                lengths=np.ones(rows, np.int32),
                kind=DECODE,
                kernel=0,
                chain=None,
            )
        ]

    def _write_forest(self, plan: worker_pb2.StepPlan) -> None:
        stored = [s.chain for s in self._segments if s.chain is not None]
        if stored and not self.num_decodes and are_one(stored):
            self._write_node(plan, stored[0])
            return
        forest = self._forests.build(self._decodes.chains + stored)
        if self.repeat > 1:  # each row has a leaf of its own
            forest.node_tokens[forest.chain_node] -= self._decodes.steps - 1
        _write_nodes(plan, forest)
        nodes = [pack_int32(forest.chain_node[: self.num_decodes])]
        chain_nodes = iter(forest.chain_node[self.num_decodes :].tolist())
        for segments in self._segments:
            node = -1 if segments.chain is None else next(chain_nodes)
            nodes.append(repeated_int32(node, len(segments.lengths)))
        plan.segment_node = b"".join(nodes)

    def _write_beams(self, plan: worker_pb2.StepPlan, beams: BeamRows) -> None:
        """Of a step with nothing else: as they are alike, in fewer calls."""
        rows, position = self.num_rows, beams.tokens - 1
        plan.token_ids = pack_int32(self._decodes.tokens)
        plan.positions = repeated_int32(position, rows)
        offset = position % self._page_size
        plan.kv_slots = pack_int32(beams.own[:, -1] * self._page_size + offset)
        plan.segment_indptr = pack_int32(np.arange(rows + 1, dtype=np.int32))
        plan.segment_kind = repeated_int32(DECODE, rows)
        plan.segment_kernel = repeated_int32(self._decodes.kernels[0], rows)
        forest = beams.forest(self._page_size)
        plan.segment_node = pack_int32(forest.chain_node)
        _write_nodes(plan, forest)

    def _write_node(self, plan: worker_pb2.StepPlan, chain: StoredChain) -> None:
        """A forest of one node, above all segments that have a chain."""
        pages = -(-chain.tokens // self._page_size)
        plan.node_parent = repeated_int32(-1, 1)
        plan.node_page_indptr = repeated_int32(0, 1) + repeated_int32(pages, 1)
        plan.node_pages = pack_int32(chain.pages[:pages])
        plan.node_tokens = repeated_int32(chain.tokens, 1)
        plan.segment_node = b"".join(
            repeated_int32(-1 if s.chain is None else 0, len(s.lengths)) for s in self._segments
        )


def _write_nodes(plan: worker_pb2.StepPlan, forest: PrefixForest) -> None:
    plan.node_parent = pack_int32(forest.node_parent)
    plan.node_page_indptr = pack_int32(forest.node_page_indptr)
    plan.node_pages = pack_int32(forest.node_pages)
    plan.node_tokens = pack_int32(forest.node_tokens)
