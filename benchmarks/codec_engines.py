"""Tree decode of ours and of the peers: each is planned once, then called once a layer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from codec_trees import PAGE_TOKENS, Case

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec_decode import CodecDecode, DecodeNumbers
from stemserve.kernels.layout import int32

Call = Callable[[LayerKV], torch.Tensor]
Engine = Callable[[Case, torch.Tensor], Call]


def own_call(case: Case, q: torch.Tensor, merge: bool = True) -> Call:
    decode = CodecDecode(case.shape, q.device, DecodeNumbers(dtype=q.dtype))
    plan = decode.plan(case.layout)
    if not merge:
        plan.merges = False
    target = AttentionState(torch.empty_like(q), torch.empty(q.shape[:2], device=q.device))

    def call(kv: LayerKV) -> torch.Tensor:
        decode.run_into(plan, q, kv, target)
        return target.out

    return call


def block_tables(case: Case) -> list[np.ndarray[Any, Any]]:
    return [case.layout.chain_pages(leaf) for leaf in case.leaves]


def fa3_call(case: Case, q: torch.Tensor) -> Call:
    tables = block_tables(case)
    width = max(len(table) for table in tables)
    table = np.zeros((len(tables), width), np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    block_table = torch.from_numpy(table).cuda()
    lengths = torch.from_numpy(case.layout.chain_tokens).cuda()
    indptr = torch.arange(len(tables) + 1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    most = int(case.layout.chain_tokens.max())
    scale = case.shape.scale

    def call(kv: LayerKV) -> torch.Tensor:
        none = None
        torch.ops._vllm_fa3_C.fwd(
            q, kv.k_pages, kv.v_pages, none, none, none, out, indptr, none, none, none, lengths,
            1, most, block_table, none, none, none, none, none, none, none, none, scale, True,
            -1, -1, 0.0, True, none, 0, none, 0, none, 1, 0, none,
        )  # fmt: skip
        return out

    return call


def flashinfer_decode(case: Case, q: torch.Tensor) -> Call:
    import flashinfer

    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )
    tables, shape = block_tables(case), case.shape
    indptr = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
    tail = (case.layout.chain_tokens - 1) % PAGE_TOKENS + 1
    wrapper.plan(
        *(torch.from_numpy(int32(a)).cuda() for a in (indptr, np.concatenate(tables), tail)),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        PAGE_TOKENS,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    out = torch.empty_like(q)
    return lambda kv: wrapper.run(q, (kv.k_pages, kv.v_pages), out=out)


def cascade_levels(case: Case) -> list[tuple[list[int], list[int]]]:
    """Per level: rows of each group (indptr), and the node of each (-1: none)."""
    chains = [case.layout.chain(leaf) for leaf in case.leaves]
    found: list[tuple[list[int], list[int]]] = []
    for level in range(max(len(chain) for chain in chains)):
        indptr, nodes = [0], list[int]()
        for row, chain in enumerate(chains):
            node = chain[level] if level < len(chain) else -1
            if nodes and node >= 0 and nodes[-1] == node:
                indptr[-1] = row + 1
            else:
                nodes.append(node)
                indptr.append(row + 1)
        found.append((indptr, nodes))
    return found


def flashinfer_cascade(case: Case, q: torch.Tensor) -> Call:
    import flashinfer

    stages, shape, layout = cascade_levels(case), case.shape, case.layout
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(stages), workspace, "NHD")
    for level in wrapper._batch_prefill_wrappers:
        level._backend = "fa2"  # `auto` takes fa3, which is slower for one row a request
    arrays: list[list[torch.Tensor]] = [[], [], [], []]
    for rows, nodes in stages:
        pages = [layout.pages(node) if node >= 0 else int32([]) for node in nodes]
        lengths = [int(layout.node_tokens[node]) if node >= 0 else 0 for node in nodes]
        indptr = np.concatenate([[0], np.cumsum([len(p) for p in pages])])
        tail = [(length - 1) % PAGE_TOKENS + 1 if length else 0 for length in lengths]
        values = (int32(rows), int32(indptr), int32(np.concatenate(pages)), int32(tail))
        for place, array in enumerate(values):
            arrays[place].append(torch.from_numpy(array).cuda())
    wrapper.plan(
        *arrays, shape.query_heads, shape.kv_heads, shape.head_dim, PAGE_TOKENS, causal=False,
        q_data_type=q.dtype,
    )  # fmt: skip
    return lambda kv: wrapper.run(q, (kv.k_pages, kv.v_pages))
