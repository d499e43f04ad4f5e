"""Query rows of a prefix forest in depth-first order, and the runs of pages that they see."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import AttentionLayout, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUnits:
    """Rows of one segment whose last token lies in one node, which is all rows but in prefill."""

    node: Int32  # [units] the deepest node of which the rows see a token; -1: none
    row: Int32  # [units] first of the layout's rows
    rows: Int32  # [units]
    visible: Int32  # [units] stored tokens of its chain, and own rows, that the first row sees
    partial: NDArray[np.bool_]  # [units] each row sees one token of the node more than the last
    is_item: NDArray[np.bool_]  # [units] row i sees the unit's rows 0..i too


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRuns:
    """Runs of pages that consecutive rows see alike; rows are in depth-first order."""

    rows: Int32  # [rows] the layout's row at each place
    visible: Int32  # [rows] tokens of its chain, and own rows, that each sees
    node: Int32  # [runs] -1: the step's own rows
    page: Int32  # [runs] first page, an index into the layout's node_pages; or first own row
    position: Int32  # [runs] place of its first token in the chain
    pages: Int32  # [runs]
    tokens: Int32  # [runs] tokens in the last page
    causal: Int32  # [runs] 1: not every row sees all
    seen: Int32  # [runs] tokens that row `low` sees, and each row after it one more
    low: Int32  # [runs] first row
    high: Int32  # [runs] row after the last


def row_units(layout: AttentionLayout) -> RowUnits:
    """Stored segments of several rows are split where their last tokens change nodes."""
    rows, chain = layout.segment_rows, layout.chain_tokens
    first_row = layout.segment_indptr[:-1]
    several = (rows > 1) & ~layout.segment_is_item
    one = np.flatnonzero((rows > 0) & ~several)
    item = layout.segment_is_item[one]
    parts: list[list[NDArray[np.integer]]] = [
        [one, layout.segment_node[one], first_row[one], rows[one], chain[one] + item]
    ]
    owner = np.flatnonzero(several)
    below, left, seen = layout.segment_node[owner], rows[owner], chain[owner]
    start = np.append(layout.node_start, np.int32(0))  # node -1 reads the last
    parent = np.append(layout.node_parent, np.int32(-1))
    while len(owner):
        here = np.where(below < 0, left, np.minimum(left, seen - start[below]))
        last = first_row[owner] + left - here
        columns = (owner, below, last, here, np.maximum(0, seen - here + 1))
        parts.append([column[here > 0] for column in columns])
        go = left > here
        owner, left = owner[go], (left - here)[go]
        seen, below = start[below[go]], parent[below[go]]
    joined = (np.concatenate(column).astype(np.int32) for column in zip(*parts, strict=True))
    segment, node, row, count, visible = joined
    order = np.argsort(segment, kind="stable")
    return RowUnits(
        node=node[order],
        row=row[order],
        rows=count[order],
        visible=visible[order],
        partial=((count > 1) & (node >= 0) & ~layout.segment_is_item[segment])[order],
        is_item=layout.segment_is_item[segment][order],
    )


def _chains(layout: AttentionLayout, node: Int32) -> Int32:  # [levels, units], -1 below its node
    """Each unit's chain, the root on level 0."""
    parent = np.append(layout.node_parent, np.int32(-1))
    levels = [node]
    while True:
        above = parent[levels[-1]]
        if above.max(initial=-1) < 0:
            break
        levels.append(above)
    chains = np.stack(levels[::-1])
    depth = (chains >= 0).sum(0)
    if depth.min(initial=len(levels)) == len(levels):
        return chains
    source = np.arange(len(levels))[:, None] + (len(levels) - depth)
    padded = np.vstack([chains, np.full((1, chains.shape[1]), -1, np.int32)])
    return np.take_along_axis(padded, np.minimum(source, len(levels)), 0)


def ordered_units(layout: AttentionLayout) -> tuple[RowUnits, Int32]:
    """The units below any node together, its own first and the partial ones before these.

    Beside the units their chains [levels, units], the root on level 0, -1 below a unit's node.
    """
    units = row_units(layout)
    nodes = layout.num_nodes
    chains = _chains(layout, units.node)
    below = np.bincount(chains.ravel() + 1, minlength=nodes + 1)[1:]
    direct = np.bincount(units.node + 1, minlength=nodes + 1)
    siblings = np.argsort(layout.node_parent, kind="stable")
    parent = layout.node_parent[siblings]
    before = np.cumsum(below[siblings]) - below[siblings]
    family = np.append(True, parent[1:] != parent[:-1])[:nodes]
    offset = np.zeros(nodes + 1, np.int64)  # the last place is for node -1
    offset[siblings] = before - before[np.maximum.accumulate(np.where(family, np.arange(nodes), 0))]
    offset[siblings] += direct[parent + 1]
    order = np.lexsort((~units.partial, offset[chains].sum(0)))
    return RowUnits(**{f.name: getattr(units, f.name)[order] for f in fields(units)}), chains[
        :, order
    ]


def node_ranges(
    chains: Int32,  # [depth, units] nodes, root first; -1: none
) -> tuple[Int32, Int32, Int32]:  # [nodes] each
    """Nodes with units below them, ascending; the first unit of each and the one after."""
    edge = chains[:, 1:] != chains[:, :-1]
    first, last = (np.ones(chains.shape, np.bool_) for _ in range(2))
    first[:, 1:], last[:, :-1] = edge, edge
    level, low = np.nonzero(first & (chains >= 0))
    high = np.nonzero(last & (chains >= 0))[1] + 1
    node = chains[level, low]
    order = np.argsort(node)
    return node[order], low[order].astype(np.int32), high[order].astype(np.int32)


def row_runs(layout: AttentionLayout, ordered: tuple[RowUnits, Int32] | None = None) -> RowRuns:
    """Put the rows in depth-first order and list what they see.

    `ordered`: the layout's ordered units, if they are there already.
    """
    units, chains = ordered or ordered_units(layout)
    indptr = np.append(np.int32(0), np.cumsum(units.rows, dtype=np.int32))
    place = np.arange(indptr[-1], dtype=np.int32) - np.repeat(indptr[:-1], units.rows)
    step = np.repeat((units.node >= 0) | units.is_item, units.rows)
    node, low, high = node_ranges(chains)
    node, low, high = (a[layout.node_tokens[node] > 0] for a in (node, low, high))
    tokens = layout.node_tokens[node]
    pages = -(-tokens // layout.page_size)
    tail = tokens - (pages - 1) * layout.page_size
    runs = RowRuns(
        rows=np.repeat(units.row, units.rows) + place,
        visible=np.repeat(units.visible, units.rows) + place * step,
        node=node,
        page=layout.node_page_indptr[node],
        position=layout.node_start[node],
        pages=pages,
        tokens=tail,
        causal=np.zeros_like(pages),
        seen=tokens,
        low=indptr[low],
        high=indptr[high],
    )
    if units.partial.any():
        runs = _split_partial(layout, runs, units, indptr)
    return _with_own_rows(runs, units, indptr, layout.page_size) if units.is_item.any() else runs


def chosen(runs: RowRuns, which: NDArray[np.integer], **changed: NDArray[np.integer]) -> RowRuns:
    """Some of the runs, by their numbers, with some of their fields changed."""
    columns = {f.name: getattr(runs, f.name)[which] for f in fields(runs)[2:]} | changed
    columns = {name: column.astype(np.int32) for name, column in columns.items()}
    return RowRuns(rows=runs.rows, visible=runs.visible, **columns)


def joined(*parts: RowRuns) -> RowRuns:
    """Runs of the same rows, part after part."""
    names = [f.name for f in fields(RowRuns)[2:]]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return RowRuns(rows=parts[0].rows, visible=parts[0].visible, **columns)


def counted(count: NDArray[np.integer]) -> tuple[NDArray[np.intp], NDArray[np.integer]]:
    """Owner of each of `count` things of every owner, and its number there: [count.sum()] each."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)


def _split_partial(
    layout: AttentionLayout, runs: RowRuns, units: RowUnits, indptr: Int32
) -> RowRuns:
    """Give the rows of a partial unit a run of their own, from the first page that is not whole."""
    size = layout.page_size
    unit = np.flatnonzero(units.partial)
    of_run = runs.node.searchsorted(units.node[unit])  # a node with a partial unit has tokens
    seen = units.visible[unit] - runs.position[of_run]  # tokens of the node that row 0 sees
    whole = runs.pages.copy()  # leading pages that all rows below the node see whole
    np.minimum.at(whole, of_run, seen // size)
    rest = runs.low + np.bincount(of_run, units.rows[unit], len(whole)).astype(np.int32)
    split = whole < runs.pages
    head, more = np.flatnonzero(whole), np.flatnonzero(split & (rest < runs.high))
    full = np.where(split, size, runs.tokens)[head]
    heads = chosen(runs, head, pages=whole[head], tokens=full)
    rests = _without(chosen(runs, more, low=rest[more]), whole[more], size)
    order = np.argsort(np.concatenate([2 * head, 2 * more + 1]))
    partial = chosen(
        runs,
        of_run,
        causal=np.ones_like(of_run),
        seen=seen,
        low=indptr[unit],
        high=indptr[unit + 1],
    )
    partial = _without(partial, whole[of_run], size)
    by_node = np.argsort(of_run, kind="stable")
    return joined(chosen(joined(heads, rests), order), chosen(partial, by_node))


def _without(runs: RowRuns, pages: Int32, size: int) -> RowRuns:
    """The runs without so many of their first pages."""
    skip = pages * size
    return chosen(
        runs,
        np.arange(len(pages)),
        page=runs.page + np.where(runs.node < 0, skip, pages),
        position=runs.position + skip,
        pages=runs.pages - pages,
        seen=runs.seen - skip,
    )


def within_window(runs: RowRuns, starts: Int32, size: int) -> tuple[RowRuns, NDArray[np.bool_]]:
    """Drop the pages before the windows of all their rows; which runs are left.

    `starts`: [rows] place of the first token that each row sees.
    """
    first = over_rows(np.minimum, starts, runs.low, runs.high)
    drop = np.clip((first - runs.position) // size, 0, runs.pages).astype(np.int32)
    left = drop < runs.pages
    return chosen(_without(runs, drop, size), np.flatnonzero(left)), left


def over_rows(
    reduce: np.ufunc,
    values: Int32,  # [rows]
    low: Int32,  # [ranges] first rows
    high: Int32,  # [ranges] rows after the last; none is empty
) -> Int32:  # [ranges]
    """The reduction of `values` over each range of rows."""
    pairs = np.empty(2 * len(low), np.int64)
    pairs[::2], pairs[1::2] = low, high
    # The last range may end at the array's end, which reduceat does not take as an index.
    found: Int32 = reduce.reduceat(np.concatenate([values, values[-1:]]), pairs)[::2]
    return found if len(low) else np.empty(0, np.int32)


def _with_own_rows(runs: RowRuns, units: RowUnits, indptr: Int32, size: int) -> RowRuns:
    """Items see their own rows, causally."""
    unit = np.flatnonzero(units.is_item)
    rows, ones = units.rows[unit], np.ones(len(unit), np.int32)
    own = RowRuns(
        rows=runs.rows,
        visible=runs.visible,
        node=-ones,
        page=units.row[unit],
        position=units.visible[unit] - 1,
        pages=-(-rows // size),
        tokens=rows - (-(-rows // size) - 1) * size,
        causal=ones,
        seen=ones,
        low=indptr[unit],
        high=indptr[unit + 1],
    )
    return joined(runs, own)
