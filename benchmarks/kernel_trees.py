"""Decode trees to measure: their layouts and floors, random KV for them, and exact answers."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32

Nodes = list[tuple[int, int]]  # parent, tokens
Heads = tuple[int, int, int]  # query, KV, head_dim

PAGE_TOKENS = 16
TREES_FILE = Path(__file__).parent / "data" / "trees.json"
REFERENCE_BYTES = 1 << 30  # of gathered keys at a time
BYTES_A_SECOND, FLOPS_A_SECOND = 4.3e12, 790e12  # of an H200; every floor uses them


class TreeFileError(ValueError):
    """A file of trees is not in the format of data/trees.json."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tree with one query row a leaf."""

    name: str
    nodes: Nodes
    shape: HeadShape
    layout: AttentionLayout

    @cached_property
    def leaves(self) -> list[int]:
        return [int(node) for node in self.layout.segment_node]

    @property
    def tokens(self) -> int:  # each node's once
        return sum(tokens for _, tokens in self.nodes)

    @property
    def share(self) -> float:
        """Tokens read if every request read its own, over unique tokens."""
        return float(self.layout.chain_tokens.sum(dtype=np.int64)) / max(1, self.tokens)

    @property
    def unique_bytes(self) -> int:
        """K and V of every token once, q and the result, 16 bits each."""
        shape = self.shape
        heads = self.tokens * shape.kv_heads + len(self.leaves) * shape.query_heads
        return 4 * shape.head_dim * heads

    @property
    def floor_us(self) -> float:
        pairs = int(self.layout.chain_tokens.sum(dtype=np.int64))
        flops = 4 * self.shape.head_dim * self.shape.query_heads * pairs
        return max(self.unique_bytes / BYTES_A_SECOND, flops / FLOPS_A_SECOND) * 1e6


@dataclass(frozen=True, kw_only=True)
class Repaged:
    """A case over other pages, and where each of their slots lies in the pages of the original."""

    case: Case
    source: NDArray[np.int64] | None  # [slots]; None: the original pages as they are

    def kv(self, original: LayerKV) -> LayerKV:
        if self.source is None:
            return original
        index = torch.from_numpy(self.source).to(original.k_pages.device)
        size = (-1, self.case.layout.page_size, *original.k_pages.shape[2:])
        k, v = (
            pages.flatten(0, 1)[index].view(size) for pages in (original.k_pages, original.v_pages)
        )
        return LayerKV(k, v, k[:0, 0], v[:0, 0])


def levels(counts: list[int], tokens: list[int]) -> Nodes:
    nodes: Nodes = []
    above: list[int] = []
    for count, length in zip(counts, tokens, strict=True):
        parents = [above[child * len(above) // count] if above else -1 for child in range(count)]
        above = list(range(len(nodes), len(nodes) + count))
        nodes += [(parent, length) for parent in parents]
    return nodes


def table_trees() -> dict[str, Nodes]:
    """The trees of the first table, all with 32 query and 8 KV heads of 128."""
    chain: Nodes = []
    for step in range(16):
        chain += [(2 * step - 2 if step else -1, 4096), (2 * step, 256)]
    forest: Nodes = []
    for _ in range(8):
        root = len(forest)
        forest += [(-1, 4096), *[(root, 256)] * 8]
    return {
        "1 x 51200 + 16 x 512": levels([1, 16], [51200, 512]),
        "1 x 122880 + 8 x 256": levels([1, 8], [122880, 256]),
        "1 x 8192 + 64 x 256": levels([1, 64], [8192, 256]),
        "1 x 1024 + 64 x 256": levels([1, 64], [1024, 256]),
        "1 x 8192 + 128 x 2048": levels([1, 128], [8192, 2048]),
        "binary, depth 5, 4096": levels([1, 2, 4, 8, 16], [4096] * 5),
        "4-ary, depth 3, 4096": levels([1, 4, 16], [4096] * 3),
        "5-ary, depth 3, 2048": levels([1, 5, 25], [2048] * 3),
        "chain of 16 x 4096, a leaf of 256 each": chain,
        "8 x (4096 + 8 x 256)": forest,
        "no sharing, 32 x 8192": [(-1, 8192)] * 32,
    }


def table_cases() -> list[Case]:
    return [case_of(name, nodes, (32, 8, 128)) for name, nodes in table_trees().items()]


def file_cases(path: Path) -> list[Case]:
    """{name: {"heads": [query, KV, dim], "nodes": [[parent, tokens], ...]}}, or TreeFileError."""
    try:
        trees: dict[str, Any] = json.loads(path.read_text())
        return [
            case_of(name, [(int(p), int(t)) for p, t in tree["nodes"]], _heads(tree["heads"]))
            for name, tree in trees.items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TreeFileError(f"{path}: {error!r}") from error


def _heads(values: list[int]) -> Heads:
    query, kv, dim = (int(value) for value in values)
    return query, kv, dim


def case_of(name: str, nodes: Nodes, heads: Heads) -> Case:
    for node, (parent, tokens) in enumerate(nodes):
        if not -1 <= parent < node or tokens < 0:
            raise TreeFileError(f"{name}: node {node} has parent {parent} and {tokens} tokens")
    query_heads, kv_heads, dim = heads
    shape = HeadShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    return Case(name=name, nodes=nodes, shape=shape, layout=_layout(nodes, PAGE_TOKENS))


def _layout(nodes: Nodes, page_tokens: int) -> AttentionLayout:
    """Pages in random order; a row for each leaf, leaves depth first."""
    inner = {parent for parent, _ in nodes}
    leaves = [node for node in _depth_first(nodes) if node not in inner]
    pages = np.array([-(-tokens // page_tokens) for _, tokens in nodes])
    indptr = np.concatenate([[0], np.cumsum(pages)])
    return AttentionLayout(
        page_size=page_tokens,
        node_parent=int32([parent for parent, _ in nodes]),
        node_page_indptr=int32(indptr),
        node_pages=int32(np.random.default_rng(len(nodes)).permutation(int(indptr[-1]))),
        node_tokens=int32([tokens for _, tokens in nodes]),
        segment_indptr=int32(range(len(leaves) + 1)),
        segment_node=int32(leaves),
        segment_is_item=np.zeros(len(leaves), np.bool_),
    )


def _depth_first(nodes: Nodes) -> list[int]:
    children: list[list[int]] = [[] for _ in nodes]
    todo: list[int] = []
    for node, (parent, _) in enumerate(nodes):
        (children[parent] if parent >= 0 else todo).append(node)
    todo.reverse()
    order: list[int] = []
    while todo:
        node = todo.pop()
        order.append(node)
        todo += reversed(children[node])
    return order


def repaged(case: Case, page_tokens: int) -> Repaged:
    """The tree for engines that read whole pages of block tables: what an inner node has beyond its
    last whole page is copied to each of its children, as servers that share pages do."""
    inner = {parent for parent, _ in case.nodes}
    whole = all(case.nodes[node][1] % page_tokens == 0 for node in inner if node >= 0)
    if whole and page_tokens == case.layout.page_size:
        return Repaged(case=case, source=None)
    contents: list[NDArray[np.int64]] = []
    carried: list[NDArray[np.int64]] = []
    for node, (parent, _) in enumerate(case.nodes):
        own = node_slots(case.layout, node)
        content = np.concatenate([carried[parent], own]) if parent >= 0 else own
        kept = len(content) // page_tokens * page_tokens if node in inner else len(content)
        contents.append(content[:kept])
        carried.append(content[kept:])
    nodes = [
        (parent, len(content)) for (parent, _), content in zip(case.nodes, contents, strict=True)
    ]
    layout = _layout(nodes, page_tokens)
    source = np.zeros(len(layout.node_pages) * page_tokens, np.int64)
    for node, content in enumerate(contents):
        source[node_slots(layout, node)] = content
    return Repaged(
        case=Case(name=case.name, nodes=nodes, shape=case.shape, layout=layout), source=source
    )


def node_slots(layout: AttentionLayout, node: int) -> NDArray[np.int64]:
    """Slots of the pool where a node's tokens are, in order."""
    first = layout.pages(node).astype(np.int64)[:, None] * layout.page_size
    return (first + np.arange(layout.page_size)).ravel()[: layout.node_tokens[node]]


def make_kv(case: Case, dtype: torch.dtype, device: str = "cuda") -> LayerKV:
    shape, layout = case.shape, case.layout
    size = (max(1, len(layout.node_pages)), layout.page_size, shape.kv_heads, shape.head_dim)
    k, v = (torch.randn(size, dtype=dtype, device=device) for _ in range(2))
    return LayerKV(k, v, k[:0, 0], v[:0, 0])


def reference(case: Case, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
    """Float64 attention of each leaf over its gathered chain; 0 where the chain is empty."""
    shape, lengths = case.shape, case.layout.chain_tokens
    out = q.new_empty(q.shape, dtype=torch.float64)
    for tokens in np.unique(lengths):
        rows = np.flatnonzero(lengths == tokens)
        row_bytes = max(1, int(tokens)) * shape.kv_heads * shape.head_dim * 8
        parts = min(len(rows), -(-len(rows) * row_bytes // REFERENCE_BYTES))
        for part in np.array_split(rows, parts):
            out[torch.from_numpy(part).to(q.device)] = _attend(case, q, kv, part)
    return out


def _attend(
    case: Case, q: torch.Tensor, kv: LayerKV, rows: NDArray[np.intp]
) -> torch.Tensor:  # [len(rows), query_heads, head_dim], of rows whose chains are equally long
    shape = case.shape
    chains = np.stack([_chain_slots(case, case.leaves[row]) for row in rows])
    index = torch.from_numpy(chains).to(q.device)
    keys, values = (
        pages.flatten(0, 1)[index].double().transpose(1, 2) for pages in (kv.k_pages, kv.v_pages)
    )
    queries = q[torch.from_numpy(rows).to(q.device)].double()
    grouped = queries.view(-1, shape.kv_heads, shape.group, shape.head_dim)
    weights = (grouped @ keys.transpose(2, 3) * shape.scale).softmax(-1)
    return (weights @ values).view(-1, shape.query_heads, shape.head_dim)


def _chain_slots(case: Case, leaf: int) -> NDArray[np.int64]:
    chain = case.layout.chain(leaf)
    return np.concatenate([node_slots(case.layout, node) for node in chain])
