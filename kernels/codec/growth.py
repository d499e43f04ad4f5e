"""How a tree-decode plan's tables change in decode steps that follow each other: places and values.

A plan of the last step serves all of them: a page that has no token yet is masked.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.codec.host_tables import Capacity, HostTables, section_starts
from stemserve.kernels.codec.pieces import RECORD
from stemserve.kernels.codec.tiles import MASKED, PAGE_BITS, STEP_TOKENS, loaded_tokens
from stemserve.kernels.layout import Int32

SEEN_SHIFT = 16  # of a mask word: tokens seen
SEEN_MASK = 127 << SEEN_SHIFT
PAGE_MASK = (1 << PAGE_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Entries of the tables that are not the same in all steps."""

    places: Int32  # [entries] in the buffer of the tables
    values: Int32  # [steps, entries]


NO_GROWTH = Growth(places=np.empty(0, np.int32), values=np.empty((1, 0), np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tails:
    """The pages into which tokens come."""

    at: NDArray[np.intp]  # [tails] their places in the streams
    seen: Int32  # [steps, tails] tokens in them


def leaf_growth(
    host: HostTables,  # of the last step
    capacity: Capacity,  # of the buffer that holds them
    tokens: Int32,  # [steps, segments] in the leaf of each segment; never fewer than before
) -> Growth:
    """Segments whose leaves grow have these to themselves."""
    if capacity.windowed:
        raise ValueError("with a sliding window the tables change in more places")
    tails = _tails(host, tokens)
    per_step = STEP_TOKENS // host.layout.page_size
    starts = section_starts(capacity, host.records.shape[1])
    record, words, masks = starts[1], starts[6], starts[7]
    copied, cells = _copies(host, tails.at, per_step)
    page = host.streams.words[tails.at] & PAGE_MASK
    word = page | tails.seen << PAGE_BITS
    mask = host.streams.masks[tails.at] & ~SEEN_MASK | MASKED | tails.seen << SEEN_SHIFT
    places = (
        words + tails.at,
        masks + tails.at,
        record + cells,
        record + cells + per_step,
    )
    return Growth(
        places=np.concatenate(places).astype(np.int32),
        values=np.concatenate((word, mask, word[:, copied], mask[:, copied]), 1).astype(np.int32),
    )


def _tails(host: HostTables, tokens: Int32) -> _Tails:
    layout, streams = host.layout, host.streams
    size = layout.page_size
    growing = np.flatnonzero(tokens[-1] > tokens[0])
    leaf = layout.segment_node[growing]
    first = tokens[0, growing] // size
    counts = (tokens[-1, growing] - 1) // size - first + 1
    owner = np.repeat(np.arange(len(growing)), counts)
    page = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    run_page = np.zeros(layout.num_nodes, np.int32)
    run_page[streams.run_node] = streams.run_page
    seen = np.clip(tokens[:, growing[owner]] - page * size, 0, size)
    number = layout.node_pages[layout.node_page_indptr[leaf[owner]] + page]
    at = _places(streams.words, run_page[leaf[owner]] + page, number)
    return _Tails(at=at, seen=seen.astype(np.int32))


def _places(words: Int32, expected: NDArray[np.intp], number: Int32) -> NDArray[np.intp]:
    """Where the pages are in the streams; with fixed splits not all of a leaf lie together."""
    wrong = words[expected] & PAGE_MASK != number
    if not wrong.any():
        return expected
    read = np.flatnonzero(loaded_tokens(words))
    read = read[np.argsort(words[read] & PAGE_MASK, kind="stable")]
    found = (words[read] & PAGE_MASK).searchsorted(number[wrong])
    places = expected.copy()
    places[wrong] = read[found]
    return places


def _copies(
    host: HostTables, at: NDArray[np.intp], per_step: int
) -> tuple[Int32, NDArray[np.intp]]:
    """Piece records repeat the pages of their first step: which tails, and in which entries."""
    tail_of = np.full(len(host.streams.words), -1, np.int32)
    tail_of[at] = np.arange(len(at), dtype=np.int32)
    live = np.flatnonzero(host.records[:, 2])
    tail = tail_of[host.records[live, 3][:, None] * per_step + np.arange(per_step)]
    record, place = np.nonzero(tail >= 0)
    return tail[record, place], live[record] * host.records.shape[1] + RECORD + place
