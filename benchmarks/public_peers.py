"""Public tree-decode kernels, from a checkout of their own: FastTree's and CoDec's.

Neither is part of this repository. Both are planned once, outside the timing, as ours is.
"""

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from decode_engines import Call, CannotRun, Engine
from kernel_trees import Case, node_slots

from stemserve.kernels.attention_state import LayerKV

FASTTREE_ROWS = 64  # of the larger tile; the smaller has a quarter
FASTTREE_SPLITS, FASTTREE_LEAST, FASTTREE_MOST = [1024, 128], [132, 528], [132, 132]
CODEC_ROWS = 16  # queries of a tile
CODEC_PAGES = (1024, 512, 256, 128, 64, 32, 16)
CODEC_SPLITS = 128  # pages of a node that it can combine


def _import_from(folder: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def fasttree_peer(source: Path) -> Engine:
    """`source`: a checkout of PanZaifeng/FastTree-Artifact. Raises ImportError."""
    kernel: Any = _import_from(source / "kernel_bench", "fasttree")
    return Engine(name="fasttree", prepare=lambda case, q: _fasttree(case, q, kernel))


@dataclass(kw_only=True)
class _TreeNode:
    """The fields that FastTree's planner reads."""

    parent: int
    id: int
    seqlen: int
    num_children: int
    requests: list[int]


def _fasttree_nodes(case: Case) -> list[_TreeNode]:
    """Its planner takes one tree: several roots get an empty one above them."""
    roots = sum(parent < 0 for parent, _ in case.nodes)
    shift = int(roots > 1)
    nodes = [_TreeNode(parent=-1, id=0, seqlen=0, num_children=0, requests=[])] * shift
    for parent, tokens in case.nodes:
        above = parent + shift if parent >= 0 else shift - 1
        nodes.append(
            _TreeNode(parent=above, id=len(nodes), seqlen=tokens, num_children=0, requests=[])
        )
    for node in nodes:
        if node.parent >= 0:
            nodes[node.parent].num_children += 1
    for row, leaf in enumerate(case.leaves):
        place = leaf + shift
        while place >= 0:
            nodes[place].requests.append(row)
            place = nodes[place].parent
    return nodes


def _fasttree(case: Case, q: torch.Tensor, kernel: Any) -> Call:
    shape, nodes = case.shape, _fasttree_nodes(case)
    if shape.group & (shape.group - 1):
        raise CannotRun(f"a group of {shape.group} heads, it takes powers of two")
    rows = max(1, FASTTREE_ROWS // shape.group)
    params = kernel.FastTreeParams()
    params.set_q_tile_sizes([rows, max(1, rows // 4)])
    params.set_kv_tile_sizes([32, 32])
    params.set_kv_group_num(shape.group)
    starts = np.concatenate([[0], np.cumsum([node.seqlen for node in nodes])]).tolist()
    with contextlib.redirect_stdout(io.StringIO()):
        tables, _ = kernel.fasttree_preparation(
            nodes, starts, len(q), shape.query_heads, shape.kv_heads, shape.head_dim,
            FASTTREE_SPLITS, FASTTREE_LEAST, FASTTREE_MOST, params,
        )  # fmt: skip
    # Its lists number the tokens node after node; ours are where the pages are.
    slots = np.concatenate(
        [np.empty(0, np.int64), *(node_slots(case.layout, n) for n in range(len(case.nodes)))]
    )
    entries = tables[0]
    where = torch.from_numpy(slots.astype(np.int32)).to(entries.device)
    entries = torch.where(entries >= 0, where[entries.clamp(min=0).long()], entries)
    out = torch.empty_like(q)

    def call(kv: LayerKV) -> torch.Tensor:
        kernel.fasttree_decode(
            q, kv.k_pages.flatten(0, 1), kv.v_pages.flatten(0, 1), out, entries, *tables[1:],
            params.TSQs, params.TSKs, shape.scale,
        )  # fmt: skip
        return out

    return call


def codec_peer(source: Path) -> Engine:
    """`source`: a checkout of wzbxpy/codec where `python setup.py build_ext --inplace` ran.

    Raises ImportError.
    """
    kernel: Any = _import_from(source, "codec_gpu")
    return Engine(
        name="codec_public", prepare=lambda case, q: _codec(case, q, kernel), pages=codec_pages
    )


def codec_pages(case: Case) -> int:
    """Its page is its split: the largest, to its default of 1024, that the shared nodes fill."""
    inner = {parent for parent, _ in case.nodes}
    shared = [case.nodes[node][1] for node in inner if node >= 0]
    filled = [size for size in CODEC_PAGES if all(tokens % size == 0 for tokens in shared)]
    return filled[0] if filled else CODEC_PAGES[-1]


@dataclass(frozen=True, kw_only=True)
class CodecTables:
    """What its kernels read: tiles of up to 16 queries over a page, and how partials join."""

    pages: list[tuple[int, int, int, int]]  # first query, queries, page, tokens
    nodes: list[tuple[int, int, int]]  # first partial row, queries, pages to combine
    edges: list[list[tuple[int, int, int]]]  # by depth: parent row, child row, queries
    leaves: list[int]  # partial row of each query

    @property
    def most_pages(self) -> int:
        return max(pages for _, _, pages in self.nodes)


def codec_tables(case: Case) -> CodecTables:
    """A plan of our own for its kernels: its planner joins wrong rows on most trees.

    Nodes without tokens are passed over: what is below them joins what is above.
    """
    layout = case.layout
    rows_of: list[list[int]] = [[] for _ in case.nodes]
    for row, leaf in enumerate(case.leaves):
        for node in layout.chain(leaf):
            rows_of[node].append(row)
    pages: list[tuple[int, int, int, int]] = []
    nodes: list[tuple[int, int, int]] = []
    edges: list[list[tuple[int, int, int]]] = []
    placed = [(0, -1)] * len(case.leaves)  # depth of the partial that a row has now, and its place
    for node, rows in enumerate(rows_of):  # parents come first
        if not rows or not layout.node_tokens[node]:
            continue
        for start in range(rows[0], rows[-1] + 1, CODEC_ROWS):
            count = min(CODEC_ROWS, rows[-1] + 1 - start)
            first = len(pages) * CODEC_ROWS
            for page, tokens in _page_tokens(case, node):
                pages.append((start, count, page, tokens))
            nodes.append((first, count, len(pages) - first // CODEC_ROWS))
            for depth, parent, child, length in _joins(placed[start : start + count], first):
                edges += [[] for _ in range(len(edges), depth + 1)]
                edges[depth].append((parent, child, length))
            for place in range(count):
                depth, above = placed[start + place]
                placed[start + place] = (depth + (above >= 0), first + place)
    if any(place < 0 for _, place in placed):
        raise CannotRun("a request without any token")
    return CodecTables(pages=pages, nodes=nodes, edges=edges, leaves=[p for _, p in placed])


def _page_tokens(case: Case, node: int) -> Iterator[tuple[int, int]]:
    left = int(case.layout.node_tokens[node])
    for page in case.layout.pages(node):
        yield int(page), min(left, case.layout.page_size)
        left -= case.layout.page_size


def _joins(above: list[tuple[int, int]], first: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of rows whose earlier partials lie side by side: depth, parent row, child row, rows."""
    start = 0
    for end in range(1, len(above) + 1):
        depth, parent = above[start]
        if end < len(above) and above[end] == (depth, parent + end - start):
            continue
        if parent >= 0:
            yield depth, parent, first + start, end - start
        start = end


def _codec(case: Case, q: torch.Tensor, kernel: Any) -> Call:
    shape = case.shape
    if (shape.query_heads, shape.kv_heads, q.dtype) != (32, 8, torch.float16):
        raise CannotRun("it takes fp16 with 32 query and 8 KV heads only")
    tables = codec_tables(case)
    if tables.most_pages > CODEC_SPLITS:
        raise CannotRun(f"a node of {tables.most_pages} pages, it combines {CODEC_SPLITS}")

    def device(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    pages, nodes, leaves = device(tables.pages), device(tables.nodes), device(tables.leaves)
    edges = [device(level) for level in tables.edges if level]
    most = tables.most_pages
    return lambda kv: kernel.tree_attn(q, kv.k_pages, kv.v_pages, pages, nodes, edges, leaves, most)
