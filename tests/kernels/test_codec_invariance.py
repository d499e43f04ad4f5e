"""With fixed splits a request's result is the same bit by bit, whatever else is in the batch."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from tests.kernels.codec_forests import PAGE, Nodes, layout_of, random_kv

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec.division import Division
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32
from stemserve.kernels.strategy import Phase

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Floats = NDArray[np.float32]
# Forks inside a step of 64 tokens and at its border, in the first and in later chunks.
FOREST: Nodes = [(-1, 48), (0, 96), (0, 21), (1, 48), (1, 160), (4, 9), (3, 33), (-1, 300), (0, 80)]
REQUESTS = [
    *[(5, 1, False), (6, 1, False), (2, 1, False), (3, 5, True), (7, 40, False)],
    *[(5, 9, False), (4, 40, True), (8, 1, True), (7, 2, True), (3, 1, False)],
]


@pytest.fixture(autouse=True)
def rows_of_a_product_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BLAS rounds a row by its place among the others; a GPU's tensor cores do not."""

    def matmul(a: Floats, b: Floats, dtype: type[np.float32]) -> Floats:
        product: Floats = np.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype))
        return product

    if DEVICE.type == "cpu":
        monkeypatch.setattr(np, "matmul", matmul)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """K/V of the forest, and rows of q and own K/V for each request."""

    forest: AttentionLayout
    shape: HeadShape
    kv: LayerKV
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def make_requests(dtype: torch.dtype, shape: HeadShape, longer: int = 1) -> Requests:
    nodes = [(parent, tokens * longer) for parent, tokens in FOREST]
    forest = layout_of(nodes, [])

    def rows(heads: int) -> list[torch.Tensor]:
        size = (heads, shape.head_dim)
        return [torch.randn((r, *size)).to(dtype).to(DEVICE) for _, r, _ in REQUESTS]

    kv = random_kv(forest, shape, dtype, DEVICE)
    kv_rows = rows(shape.kv_heads), rows(shape.kv_heads)
    return Requests(
        forest=forest,
        shape=shape,
        kv=kv,
        q=rows(shape.query_heads),
        k=kv_rows[0],
        v=kv_rows[1],
    )


def batch(forest: AttentionLayout, chosen: list[int]) -> AttentionLayout:
    segments = [REQUESTS[request] for request in chosen]
    return AttentionLayout(
        page_size=PAGE,
        node_parent=forest.node_parent,
        node_page_indptr=forest.node_page_indptr,
        node_pages=forest.node_pages,
        node_tokens=forest.node_tokens,
        segment_indptr=int32(np.cumsum([0, *(rows for _, rows, _ in segments)])),
        segment_node=int32([node for node, _, _ in segments]),
        segment_is_item=np.array([item for _, _, item in segments], np.bool_),
    )


def alone(forest: AttentionLayout, request: int) -> AttentionLayout:
    """The chain as one node, as it is where nobody else has a part of it."""
    node, rows, item = REQUESTS[request]
    pages = forest.chain_pages(node)
    return AttentionLayout(
        page_size=PAGE,
        node_parent=int32([-1]),
        node_page_indptr=int32([0, len(pages)]),
        node_pages=pages,
        node_tokens=int32([forest.node_start[node] + forest.node_tokens[node]]),
        segment_indptr=int32([0, rows]),
        segment_node=int32([0]),
        segment_is_item=np.array([item], np.bool_),
    )


def run(
    requests: Requests, layout: AttentionLayout, chosen: list[int], bins: int
) -> AttentionState:
    numbers = DecodeNumbers(dtype=requests.q[0].dtype)
    division = Division(fixed_split=128)
    decode = CodecDecode(
        requests.shape, DEVICE, numbers, bins, phase=Phase.PREFILL, division=division
    )
    q, k, v = (
        torch.cat([rows[request] for request in chosen])
        for rows in (requests.q, requests.k, requests.v)
    )
    kv = LayerKV(requests.kv.k_pages, requests.kv.v_pages, k, v)
    return decode.run(decode.plan(layout), q, kv)


def parts(state: AttentionState, chosen: list[int]) -> dict[int, AttentionState]:
    found: dict[int, AttentionState] = {}
    start = 0
    for request in chosen:
        rows = slice(start, start + REQUESTS[request][1])
        found[request] = AttentionState(state.out[rows], state.lse[rows])
        start = rows.stop
    return found


def check(requests: Requests, seed: int) -> None:
    rng = np.random.default_rng(seed)
    everyone = list(range(len(REQUESTS)))
    orders = [everyone, rng.permutation(everyone).tolist(), rng.permutation(everyone)[:4].tolist()]
    found = [
        parts(run(requests, batch(requests.forest, order), order, 5), order) for order in orders
    ]
    for request in everyone:
        single = run(requests, alone(requests.forest, request), [request], 3)
        assert not single.out.isnan().any()
        for state in (states[request] for states in found if request in states):
            assert torch.equal(state.out, single.out), request
            assert torch.equal(state.lse, single.lse), request


def test_a_request_alone_and_among_others_gives_the_same_bits() -> None:
    shape = HeadShape(query_heads=4, kv_heads=1, head_dim=16, scale=0.25)
    check(make_requests(torch.float16, shape), 1)


def test_a_group_that_does_not_divide_a_tile_gives_the_same_bits() -> None:
    shape = HeadShape(query_heads=5, kv_heads=1, head_dim=16, scale=0.25)
    check(make_requests(torch.float32, shape), 2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("longer", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_real_shape_gives_the_same_bits(dtype: torch.dtype, longer: int) -> None:
    shape = HeadShape(query_heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
    check(make_requests(dtype, shape, longer), 3)
