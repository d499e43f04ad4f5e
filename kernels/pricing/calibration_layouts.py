"""Layouts over which strategies are measured: well spread sizes, in an order that may be cut."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stemserve.kernels.layout import AttentionLayout, Int32, int32

PAGE_SIZE = 16

# Additive recurrences: any first part of such a sequence is spread evenly (Roberts' R4 and R5).
_R4 = 1 / 1.1673039782614187 ** np.arange(1, 5)
_R5 = 1 / 1.1347241384015194 ** np.arange(1, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreShape:
    """Items over one prefix, which is in the cache or computed in the same step."""

    prefix: int
    item_rows: int
    items: int
    cached: bool

    def layout(self, shuffle: np.random.Generator) -> AttentionLayout:
        """Pages in random order, as a cache has them after a while."""
        pages = -(-self.prefix // PAGE_SIZE)
        context = [] if self.cached else [self.prefix]
        rows = int32([*context, *([self.item_rows] * self.items)])
        return AttentionLayout(
            page_size=PAGE_SIZE,
            node_parent=int32([-1]),
            node_page_indptr=int32([0, pages]),
            node_pages=int32(shuffle.permutation(pages) + 1),
            node_tokens=int32([self.prefix]),
            segment_indptr=_indptr(rows),
            segment_node=np.zeros(len(rows), np.int32),
            segment_is_item=np.arange(len(rows)) >= len(context),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLimits:
    prefix: int = 32768
    item_rows: int = 1024
    items: int = 512
    rows: int = 65536  # of all items


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    requests: int = 512
    node_tokens: int = 65536
    tokens: int = 1 << 19  # stored, in all


def score_shapes(limits: ScoreLimits) -> Iterator[ScoreShape]:
    """Endless."""
    number = 0
    while True:
        number += 1
        prefix, rows, items, coin = (0.5 + number * _R4) % 1
        shape = ScoreShape(
            prefix=_size(prefix, limits.prefix),
            item_rows=_size(rows, limits.item_rows),
            items=_size(items, limits.items),
            cached=bool(coin < 0.5),
        )
        if shape.item_rows * shape.items <= limits.rows:
            yield shape


def decode_layouts(limits: DecodeLimits) -> Iterator[AttentionLayout]:
    """Endless: requests below one root or several, with further levels between or without."""
    number = 0
    while True:
        number += 1
        place = (0.5 + number * _R5) % 1
        requests = _size(place[0], limits.requests)
        roots = 1 if place[4] < 0.6 else _size(place[1], requests)
        widths = [roots, requests]
        if 0.4 < place[4] < 0.75 and requests > 3 * roots:
            widths.insert(1, round((requests * roots) ** 0.5))
        shared, own = _size(place[2], limits.node_tokens), _size(place[3], limits.node_tokens // 8)
        lengths = [_whole_pages(shared), *([_whole_pages(own)] * (len(widths) - 2)), own]
        if sum(map(int.__mul__, widths, lengths)) <= limits.tokens:
            yield tree_layout(widths, lengths, np.random.default_rng(number))


def tree_layout(
    widths: list[int], lengths: list[int], shuffle: np.random.Generator
) -> AttentionLayout:
    """A decode row at each node of the last level; pages in random order."""
    parents, tokens, level_start = [-1] * widths[0], [lengths[0]] * widths[0], 0
    for above, width, length in zip(widths, widths[1:], lengths[1:], strict=False):
        below = level_start + np.arange(width) * above // width
        level_start = len(parents)
        parents += below.tolist()
        tokens += [length] * width
    pages = -(-int32(tokens) // PAGE_SIZE)
    leaves = np.arange(level_start, len(parents), dtype=np.int32)
    return AttentionLayout(
        page_size=PAGE_SIZE,
        node_parent=int32(parents),
        node_page_indptr=_indptr(pages),
        node_pages=int32(shuffle.permutation(int(pages.sum())) + 1),
        node_tokens=int32(tokens),
        segment_indptr=np.arange(len(leaves) + 1, dtype=np.int32),
        segment_node=leaves,
        segment_is_item=np.zeros(len(leaves), np.bool_),
    )


def _size(place: float, most: int) -> int:
    """1 to `most`, evenly in the logarithm, for 0 <= place < 1."""
    return min(most, int((most + 1) ** place))


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE) * PAGE_SIZE


def _indptr(counts: Int32) -> Int32:
    return np.append(0, np.cumsum(counts, dtype=np.int64)).astype(np.int32)
