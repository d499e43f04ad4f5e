"""Calls in which every segment reads its own chain, however many others read the same pages."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32, int32
from stemserve.kernels.torch_paths.calls import (
    MAX_BATCHED_TOKENS,
    Call,
    PageTokens,
    batch_page_calls,
    dense_call,
    own_row_calls,
    shared_page_calls,
)
from stemserve.kernels.torch_paths.schedule import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReads:
    """For each segment: rows that see `whole` tokens, and then one more token each."""

    row_start: Int32  # [segments] first row that sees anything
    rows: Int32  # [segments]
    whole: Int32  # [segments] tokens of the chain that all those rows see
    stepped: Int32  # [segments] tokens after them: row i sees 0..i; 0 for one row or an item

    @classmethod
    def of_layout(cls, layout: AttentionLayout, segments: Int32) -> "ChainReads":
        chain, asked = layout.chain_tokens[segments], layout.segment_rows[segments]
        is_item = layout.segment_is_item[segments]
        rows = np.where(is_item, asked * (chain > 0), np.minimum(asked, chain)).astype(np.int32)
        stepped = np.where(is_item | (rows <= 1), 0, rows).astype(np.int32)
        return cls(
            row_start=(layout.segment_indptr[segments + 1] - rows).astype(np.int32),
            rows=rows,
            whole=(chain - stepped).astype(np.int32),
            stepped=stepped,
        )


# `segments` below: [segments] numbers of the layout's segments that are computed.


def own_stage(layout: AttentionLayout, segments: Int32) -> Stage:
    """The items among the segments over their own rows."""
    items = segments[layout.segment_is_item[segments] & (layout.segment_rows[segments] > 0)]
    first = layout.segment_indptr[items]
    return own_row_calls(first, layout.segment_rows[items], first)


def stepped_stage(layout: AttentionLayout, segments: Int32, *, copied: bool = False) -> Stage:
    """The part of each stored segment's chain that its own rows have just written."""
    reads = ChainReads.of_layout(layout, segments)
    calls: Stage = []
    for i in np.flatnonzero(reads.stepped).tolist():
        tokens = PageTokens(
            pages=layout.chain_pages(int(layout.segment_node[segments[i]])),
            start=int(reads.whole[i]),
            tokens=int(reads.stepped[i]),
            page_size=layout.page_size,
            copied=copied,
        )
        rows = reads.row_start[i : i + 1], reads.rows[i : i + 1]
        calls.append(Call(row_start=rows[0], rows=rows[1], tokens=tokens, causal=True))
    return calls


def copied_chain_stage(layout: AttentionLayout, segments: Int32) -> Stage:
    """Every segment over a contiguous copy of its chain, one by one."""
    reads = ChainReads.of_layout(layout, segments)
    calls: Stage = []
    for i in np.flatnonzero((reads.rows > 0) & (reads.whole > 0)).tolist():
        tokens = PageTokens(
            pages=layout.chain_pages(int(layout.segment_node[segments[i]])),
            start=0,
            tokens=int(reads.whole[i]),
            page_size=layout.page_size,
            copied=True,
        )
        calls.append(dense_call(int(reads.row_start[i]), int(reads.rows[i]), tokens))
    return calls


def chain_stages(layout: AttentionLayout, segments: Int32) -> list[Stage]:
    """Every segment over the pages of its block table, in pieces that lie together.

    Segments that read the same piece share a call, not the read.
    """
    reads = ChainReads.of_layout(layout, segments)
    readers: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for i in np.flatnonzero((reads.rows > 0) & (reads.whole > 0)).tolist():
        readers[int(layout.segment_node[segments[i]]), int(reads.whole[i])].append(i)
    # By stage, then by the piece that is read: (first slot, tokens), or the reading chain.
    stages: defaultdict[int, dict[tuple[int, int], tuple[PageTokens, list[int]]]] = defaultdict(
        dict
    )
    for (node, whole), members in readers.items():
        for stage, piece in enumerate(_pieces(layout.chain_pages(node), whole, layout.page_size)):
            slot = piece.first_slot
            key = (-1 - node, whole) if slot is None else (slot, piece.tokens)
            stages[stage].setdefault(key, (piece, []))[1].extend(members)
    return [_stage(reads, list(pieces.values())) for _, pieces in sorted(stages.items())]


def _stage(reads: ChainReads, pieces: Sequence[tuple[PageTokens, list[int]]]) -> Stage:
    calls: Stage = []
    for piece, members in pieces:
        order = np.sort(int32(members))
        calls += shared_page_calls(reads.row_start[order], reads.rows[order], piece)
    return batch_page_calls(calls)


def _pieces(pages: Int32, tokens: int, page_size: int) -> list[PageTokens]:
    """Long stretches of consecutive pages, each read in place, and one list of all the rest."""
    pages = pages[: -(-tokens // page_size)]
    stretches = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
    unused = len(pages) * page_size - tokens  # slots of the last page
    long: list[PageTokens] = []
    rest: list[Int32] = []
    for i, stretch in enumerate(stretches):
        held = len(stretch) * page_size - (unused if i == len(stretches) - 1 else 0)
        if held > MAX_BATCHED_TOKENS or len(stretches) == 1:
            long.append(PageTokens(pages=stretch, start=0, tokens=held, page_size=page_size))
        else:
            rest.append(stretch)
    if rest:
        held = tokens - sum(piece.tokens for piece in long)
        pages = np.concatenate(rest)
        long.append(PageTokens(pages=pages, start=0, tokens=held, page_size=page_size))
    return long
