"""Peers that read shared pages through block tables: FlashInfer's, and a FlashAttention 3 build."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_engines import Call, CannotRun, Engine, whole_pages
from kernel_trees import PAGE_TOKENS, Case
from numpy.typing import NDArray

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import Int32, int32

WORKSPACE_BYTES = 512 << 20
XQA_SEMAPHORES = 1 << 20


def flashinfer_peers() -> list[Engine]:
    """Raises ImportError where FlashInfer is missing."""
    import flashinfer  # noqa: F401

    return [
        Engine(name="fi_decode", prepare=_flashinfer_decode, pages=whole_pages),
        Engine(name="fi_batch", prepare=_flashinfer_batch, pages=whole_pages),
        Engine(name="xqa", prepare=_flashinfer_xqa, pages=whole_pages),
        Engine(name="cascade_auto", prepare=lambda case, q: _cascade(case, q, None)),
        Engine(name="cascade_fa2", prepare=lambda case, q: _cascade(case, q, "fa2")),
    ]


def fa3_peer(library: Path) -> Engine:
    """`_vllm_fa3_C` of vLLM; raises OSError where it cannot be loaded."""
    ops: Any = torch.ops
    ops.load_library(str(library))
    return Engine(name="fa3", prepare=_fa3, pages=whole_pages)


@dataclass(frozen=True, kw_only=True)
class BlockTables:
    pages: list[Int32]  # [rows] of each row's chain

    @property
    def indptr(self) -> Int32:
        return int32(np.concatenate([[0], np.cumsum([len(table) for table in self.pages])]))

    @property
    def flat(self) -> Int32:
        return int32(np.concatenate([np.empty(0, np.int32), *self.pages]))

    @property
    def padded(self) -> Int32:  # [rows, pages]
        table = np.zeros((len(self.pages), max(1, *map(len, self.pages))), np.int32)
        for row, pages in enumerate(self.pages):
            table[row, : len(pages)] = pages
        return table


def block_tables(case: Case) -> BlockTables:
    return BlockTables(pages=[case.layout.chain_pages(leaf) for leaf in case.leaves])


@cache
def _workspace() -> torch.Tensor:
    """Of one engine at a time: what is in it lives no longer than a call."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _device(array: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def _heads(case: Case) -> tuple[int, int, int]:
    return case.shape.query_heads, case.shape.kv_heads, case.shape.head_dim


def _flashinfer_decode(case: Case, q: torch.Tensor) -> Call:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=True, backend="fa2"
    )
    tables = block_tables(case)
    tail = int32((case.layout.chain_tokens - 1) % PAGE_TOKENS + 1)
    wrapper.plan(
        _device(tables.indptr),
        _device(tables.flat),
        _device(tail),
        *_heads(case),
        PAGE_TOKENS,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    out = torch.empty_like(q)
    return lambda kv: wrapper.run(q, (kv.k_pages, kv.v_pages), out=out)


def _flashinfer_batch(case: Case, q: torch.Tensor) -> Call:
    import flashinfer

    wrapper = flashinfer.BatchAttention("NHD")
    tables, (query_heads, kv_heads, dim) = block_tables(case), _heads(case)
    wrapper.plan(
        _device(np.arange(len(q) + 1, dtype=np.int32)),
        _device(tables.indptr),
        _device(tables.flat),
        _device(case.layout.chain_tokens),
        query_heads,
        kv_heads,
        dim,
        dim,
        PAGE_TOKENS,
        causal=False,
        sm_scale=case.shape.scale,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    def call(kv: LayerKV) -> torch.Tensor:
        wrapper.run(q, (kv.k_pages, kv.v_pages), out=out, lse=lse)
        return out

    return call


def _flashinfer_xqa(case: Case, q: torch.Tensor) -> Call:
    from flashinfer.xqa import xqa

    table = _device(block_tables(case).padded)
    lengths = _device(case.layout.chain_tokens.astype(np.int64)).to(torch.uint32).unsqueeze(1)
    semaphores = torch.zeros(XQA_SEMAPHORES, dtype=torch.int32, device="cuda").view(torch.uint32)
    beams, out = q.unsqueeze(1), torch.empty_like(q)
    target = out.unsqueeze(1)

    def call(kv: LayerKV) -> torch.Tensor:
        xqa(
            beams, kv.k_pages, kv.v_pages, table, lengths, target, _workspace(), semaphores,
            case.shape.kv_heads, PAGE_TOKENS,
        )  # fmt: skip
        return out

    return call


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


def _cascade(case: Case, q: torch.Tensor, backend: str | None) -> Call:
    """None: the backend that the wrapper takes by itself, which is fa3 on Hopper."""
    import flashinfer

    stages, layout = cascade_levels(case), case.layout
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(stages), _workspace(), "NHD")
    if backend is not None:
        for level in wrapper._batch_prefill_wrappers:
            level._backend = backend
    arrays: list[list[torch.Tensor]] = [[], [], [], []]
    for rows, nodes in stages:
        pages = [layout.pages(node) if node >= 0 else int32([]) for node in nodes]
        lengths = [int(layout.node_tokens[node]) if node >= 0 else 0 for node in nodes]
        indptr = np.concatenate([[0], np.cumsum([len(p) for p in pages])])
        tail = [(length - 1) % PAGE_TOKENS + 1 if length else 0 for length in lengths]
        values = (int32(rows), int32(indptr), int32(np.concatenate(pages)), int32(tail))
        for place, array in enumerate(values):
            arrays[place].append(_device(array))
    wrapper.plan(*arrays, *_heads(case), PAGE_TOKENS, causal=False, q_data_type=q.dtype)
    return lambda kv: wrapper.run(q, (kv.k_pages, kv.v_pages))


def _fa3(case: Case, q: torch.Tensor) -> Call:
    if int(case.layout.chain_tokens.min()) == 0:
        raise CannotRun("a request without any token")
    block_table = _device(block_tables(case).padded)
    lengths = _device(case.layout.chain_tokens)
    indptr = torch.arange(len(q) + 1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    most, scale = int(case.layout.chain_tokens.max()), case.shape.scale
    ops: Any = torch.ops

    def call(kv: LayerKV) -> torch.Tensor:
        none = None
        ops._vllm_fa3_C.fwd(
            q, kv.k_pages, kv.v_pages, none, none, none, out, indptr, none, none, none, lengths,
            1, most, block_table, none, none, none, none, none, none, none, none, scale, True,
            -1, -1, 0.0, True, none, 0, none, 0, none, 1, 0, none,
        )  # fmt: skip
        return out

    return call
