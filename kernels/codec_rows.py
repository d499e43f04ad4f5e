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
    seen: Int32  # [runs] of these, tokens that row `low` sees
    causal: Int32  # [runs] 1: row low + i sees i tokens more
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


def node_ranges(chains: Int32) -> tuple[Int32, Int32, Int32]:
    """Nodes with units below them, ascending; the first unit of each and the one after."""
    edge = chains[:, 1:] != chains[:, :-1]
    first, last = (np.ones(chains.shape, np.bool_) for _ in range(2))
    first[:, 1:], last[:, :-1] = edge, edge
    level, low = np.nonzero(first & (chains >= 0))
    high = np.nonzero(last & (chains >= 0))[1] + 1
    node = chains[level, low]
    order = np.argsort(node)
    return node[order], low[order].astype(np.int32), high[order].astype(np.int32)


def row_runs(layout: AttentionLayout) -> RowRuns:
    """Put the rows in depth-first order and list what they see."""
    units, chains = ordered_units(layout)
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
        seen=tail,
        causal=np.zeros_like(pages),
        low=indptr[low],
        high=indptr[high],
    )
    if units.partial.any():
        runs = _split_partial(layout, runs, units, indptr)
    return _with_own_rows(runs, units, indptr, layout.page_size) if units.is_item.any() else runs


def _chosen(runs: RowRuns, which: NDArray[np.integer], **changed: Int32) -> dict[str, Int32]:
    """The fields of some runs, some of them changed."""
    return {f.name: getattr(runs, f.name)[which] for f in fields(runs)[2:]} | changed


def _joined(runs: RowRuns, parts: list[dict[str, Int32]]) -> RowRuns:
    names = parts[0].keys()
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    columns = {name: column.astype(np.int32) for name, column in columns.items()}
    return RowRuns(rows=runs.rows, visible=runs.visible, **columns)


def counted(count: NDArray[np.integer]) -> tuple[NDArray[np.intp], NDArray[np.integer]]:
    """For each of `count` things of every owner, its owner and its number among these."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)


def _split_partial(
    layout: AttentionLayout, runs: RowRuns, units: RowUnits, indptr: Int32
) -> RowRuns:
    """Give the pages that a partial unit's rows do not all see whole a run each for its rows."""
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
    heads = _chosen(runs, head, pages=whole[head], tokens=full, seen=full)
    skip = whole[more]
    rests = _chosen(runs, more, low=rest[more])
    rests |= {
        "page": rests["page"] + skip,
        "pages": rests["pages"] - skip,
        "position": rests["position"] + skip * size,
    }
    order = np.argsort(np.concatenate([2 * head, 2 * more + 1]))
    both = {name: np.concatenate([heads[name], rests[name]])[order] for name in heads}

    owner, page = counted((runs.pages - whole)[of_run])
    run, page = of_run[owner], page + whole[of_run[owner]]
    first = np.maximum(0, page * size - seen[owner] + 1)  # first row that sees it
    left = layout.node_tokens[runs.node[run]] - page * size
    tails = _chosen(
        runs,
        run,
        page=runs.page[run] + page,
        position=runs.position[run] + page * size,
        pages=np.ones_like(page),
        tokens=np.minimum(size, left),
        seen=np.minimum(size, seen[owner] + first - page * size),
        causal=np.ones_like(page),
        low=indptr[unit[owner]] + first,
        high=indptr[unit[owner] + 1],
    )
    order = np.lexsort((page, owner, run))
    return _joined(runs, [both, {name: column[order] for name, column in tails.items()}])


def _with_own_rows(runs: RowRuns, units: RowUnits, indptr: Int32, size: int) -> RowRuns:
    """Items see their own rows, causally: a run a page of them."""
    unit = np.flatnonzero(units.is_item)
    owner, page = counted(-(-units.rows[unit] // size))
    unit = unit[owner]
    ones = np.ones(len(unit), np.int32)
    own = {
        "node": -ones,
        "page": units.row[unit] + page * size,
        "position": units.visible[unit] - 1 + page * size,
        "pages": ones,
        "tokens": np.minimum(size, units.rows[unit] - page * size),
        "seen": ones,
        "causal": ones,
        "low": indptr[unit] + page * size,
        "high": indptr[unit + 1],
    }
    return _joined(runs, [_chosen(runs, np.arange(len(runs.node))), own])
