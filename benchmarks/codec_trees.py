"""Decode trees to measure: their layouts, floors in time, random KV and exact answers."""

from dataclasses import dataclass

import numpy as np
import torch

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32

Nodes = list[tuple[int, int]]  # parent, tokens
PAGE_TOKENS = 16
BYTES_A_SECOND, FLOPS_A_SECOND = 4.3e12, 790e12


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    nodes: Nodes
    shape: HeadShape
    layout: AttentionLayout

    @property
    def leaves(self) -> list[int]:
        return [int(node) for node in self.layout.segment_node]

    @property
    def floor_us(self) -> float:
        shape, tokens = self.shape, sum(tokens for _, tokens in self.nodes)
        rows = len(self.leaves)
        read = 4 * shape.head_dim * (tokens * shape.kv_heads + rows * shape.query_heads)
        seen = int(self.layout.chain_tokens.sum())
        flops = 4 * shape.head_dim * shape.query_heads * seen
        return max(read / BYTES_A_SECOND, flops / FLOPS_A_SECOND) * 1e6


def levels(counts: list[int], tokens: list[int]) -> Nodes:
    nodes: Nodes = []
    above: list[int] = []
    for count, length in zip(counts, tokens, strict=True):
        parents = [above[child * len(above) // count] if above else -1 for child in range(count)]
        above = list(range(len(nodes), len(nodes) + count))
        nodes += [(parent, length) for parent in parents]
    return nodes


def table_trees() -> dict[str, Nodes]:
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


def case_of(name: str, nodes: Nodes, heads: tuple[int, int, int]) -> Case:
    inner = {parent for parent, _ in nodes}
    leaves = [node for node in range(len(nodes)) if node not in inner]
    pages = np.array([-(-tokens // PAGE_TOKENS) for _, tokens in nodes])
    indptr = np.concatenate([[0], np.cumsum(pages)])
    layout = AttentionLayout(
        page_size=PAGE_TOKENS,
        node_parent=int32([parent for parent, _ in nodes]),
        node_page_indptr=int32(indptr),
        node_pages=int32(np.random.default_rng(len(nodes)).permutation(int(indptr[-1]))),
        node_tokens=int32([tokens for _, tokens in nodes]),
        segment_indptr=int32(range(len(leaves) + 1)),
        segment_node=int32(leaves),
        segment_is_item=np.zeros(len(leaves), np.bool_),
    )
    query_heads, kv_heads, dim = heads
    shape = HeadShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    return Case(name=name, nodes=nodes, shape=shape, layout=layout)


def make_kv(case: Case, dtype: torch.dtype) -> LayerKV:
    shape = case.shape
    size = (len(case.layout.node_pages), PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    k, v = (torch.randn(size, dtype=dtype, device="cuda") for _ in range(2))
    return LayerKV(k, v, k[:0, 0], v[:0, 0])


def reference(case: Case, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
    """Float64 attention of each leaf over its gathered chain."""
    shape, layout, outs = case.shape, case.layout, []
    flat_k, flat_v = kv.k_pages.flatten(0, 1), kv.v_pages.flatten(0, 1)
    for row, leaf in enumerate(case.leaves):
        slots = [
            (
                layout.pages(node).astype(np.int64)[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
            ).ravel()[: layout.node_tokens[node]]
            for node in layout.chain(leaf)
        ]
        index = torch.from_numpy(np.concatenate(slots)).cuda()
        keys = flat_k[index].double().transpose(0, 1)
        values = flat_v[index].double().transpose(0, 1)
        rows = q[row].double().view(shape.kv_heads, shape.group, shape.head_dim)
        weights = (rows @ keys.transpose(1, 2) * shape.scale).softmax(-1)
        outs.append((weights @ values).view(shape.query_heads, shape.head_dim))
    return torch.stack(outs)
