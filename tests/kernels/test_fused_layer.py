"""Norms, gates and heads in one launch each, against float64 and against torch in the same type.

Without a GPU the tests run in Triton's interpreter.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from stemserve.kernels.fused import reference as fused_reference
from stemserve.kernels.fused.gate import silu_mul
from stemserve.kernels.fused.heads import Heads
from stemserve.kernels.fused.norm import add_rms_norm, rms_norm
from stemserve.kernels.fused.split_heads import HeadTransform, PageTarget, split_heads
from stemserve.kernels.layout import HeadShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HIDDEN = (1, 48, 1024, 2560, 5120)
EPS = 1e-6

# Query heads, KV heads, head_dim.
SHAPES = ((16, 8, 128), (4, 2, 12), (28, 4, 64), (7, 1, 80), (2, 2, 256), (40, 8, 128))


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def is_cut(dtype: torch.dtype) -> bool:
    """The interpreter cuts bfloat16 numbers off, where a GPU rounds."""
    return dtype == torch.bfloat16 and DEVICE.type == "cpu"


def assert_no_worse(found: Tensor, torch_way: Tensor, exact: Tensor) -> None:
    """In root mean square no further from float64 than torch; in single numbers twice as far."""
    exact = exact.double().cpu()
    ours, theirs = (found.double().cpu() - exact).abs(), (torch_way.double().cpu() - exact).abs()
    floor = 1e-6 * exact.square().mean().sqrt()
    assert not found.isnan().any()
    if is_cut(found.dtype):
        assert (ours <= exact.abs() / 128 + floor).all()
        return
    assert ours.square().mean().sqrt() <= 1.05 * theirs.square().mean().sqrt() + floor
    assert ours.max() <= 2 * theirs.max() + 10 * floor


@pytest.fixture(autouse=True)
def seed() -> int:
    value = int(torch.seed()) % 2**31
    torch.default_generator.manual_seed(value)
    print(f"seed {value}")
    return value


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_loses_no_more_than_torch(dtype: torch.dtype, hidden: int) -> None:
    x, weight = randn(5, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    exact = fused_reference.rms_norm(x, weight, EPS)
    assert_no_worse(rms_norm(x, weight, EPS), F.rms_norm(x, (hidden,), weight, EPS), exact)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_is_added_in_place_before_the_norm(dtype: torch.dtype, hidden: int) -> None:
    wide = randn(5, hidden + 16, dtype=dtype)
    x, weight = wide[:, 8 : hidden + 8], randn(hidden, dtype=dtype)
    residual = randn(5, hidden, dtype=dtype)
    kept, total = residual.clone(), residual + x
    out = add_rms_norm(x, residual, weight, EPS)
    assert is_cut(dtype) or torch.equal(residual, total)
    torch.testing.assert_close(residual, total)
    exact = fused_reference.rms_norm(kept.double() + x.double(), weight, EPS)
    if is_cut(dtype):
        exact = fused_reference.rms_norm(residual, weight, EPS)
    assert_no_worse(out, F.rms_norm(total, (hidden,), weight, EPS), exact)


def test_rows_of_zeros_and_of_large_numbers_have_a_norm() -> None:
    x = torch.zeros(2, 64, dtype=torch.float16, device=DEVICE)
    x[1] = 6e4  # whose square no float16 holds
    out = rms_norm(x, torch.ones_like(x[0]), EPS)
    assert torch.equal(out.cpu(), torch.tensor([[0.0], [1.0]]).half().expand(2, 64))


@pytest.mark.parametrize("width", [1, 80, 3072])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_loses_no_more_than_torch(dtype: torch.dtype, width: int) -> None:
    gate_up = randn(3, 2 * width, dtype=dtype) * 3
    gate, up = gate_up.chunk(2, dim=-1)
    assert_no_worse(silu_mul(gate_up), F.silu(gate) * up, fused_reference.silu_mul(gate_up))


def test_gates_far_from_zero_are_closed_or_open() -> None:
    gate_up = torch.tensor([[-2e4, 2e4, -120.0, 2.0, 2.0, 2.0]], device=DEVICE)
    with np.errstate(over="ignore"):  # the interpreter warns of the exponential
        assert silu_mul(gate_up).cpu().numpy().tolist() == [[0.0, 4e4, 0.0]]


def head_shape(query_heads: int, kv_heads: int, dim: int) -> HeadShape:
    return HeadShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)


def random_transform(shape: HeadShape, positions: int = 64) -> HeadTransform:
    angles = torch.rand(positions, shape.head_dim // 2) * 100
    table = torch.stack((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    return HeadTransform(shape=shape, table=table, eps=EPS)


def torch_heads(
    qkv: Tensor, positions: Tensor, norm: Tensor | None, transform: HeadTransform
) -> Heads:
    """In the type of qkv; float64 for the exact result."""
    shape = transform.shape
    by_head = qkv.view(len(qkv), -1, shape.head_dim)
    x = by_head[:, : shape.query_heads + shape.kv_heads]
    if norm is not None:
        x = F.rms_norm(x, (shape.head_dim,), eps=transform.eps) * norm
    cos, sin = transform.table[positions].to(qkv.dtype).unbind(1)
    x = fused_reference.rotated(x, cos, sin).to(qkv.dtype)
    return Heads(
        x[:, : shape.query_heads],
        x[:, shape.query_heads :],
        by_head[:, shape.query_heads + shape.kv_heads :],
    )


def random_pages(shape: HeadShape, dtype: torch.dtype, pages: int = 9) -> tuple[Tensor, Tensor]:
    size = (pages, 4, shape.kv_heads, shape.head_dim)
    return randn(*size, dtype=torch.float32).to(dtype), randn(*size, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_and_pages(dtype: torch.dtype, heads: tuple[int, int, int], has_norm: bool) -> None:
    shape = head_shape(*heads)
    query_heads, kv_heads, dim = heads
    transform = random_transform(shape)
    qkv = randn(6, (query_heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([0, 63, 7, 7, 1, 30], device=DEVICE)
    norm = randn(query_heads + kv_heads, dim, dtype=dtype) if has_norm else None
    pages = random_pages(shape, dtype)
    untouched = [each.clone() for each in pages]
    slots = torch.tensor([33, -1, 5, 4, -1, 0], dtype=torch.int32, device=DEVICE)
    target = PageTarget(k_pages=pages[0], v_pages=pages[1], slots=slots)

    found = split_heads(qkv, positions, norm, transform, target)

    torch_way = torch_heads(qkv, positions, norm, transform)
    exact_norm = None if norm is None else norm.double()
    exact = torch_heads(qkv.double(), positions, exact_norm, transform)
    assert_no_worse(found.q, torch_way.q, exact.q)
    assert_no_worse(found.k, torch_way.k, exact.k)
    assert torch.equal(found.v, torch_way.v)
    assert all(each.is_contiguous() for each in found)
    for cache, before, rows in zip(pages, untouched, (found.k, found.v), strict=True):
        expected = before.flatten(0, 1).clone()
        expected[slots[slots >= 0].long()] = rows[slots >= 0]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_without_pages_nothing_but_the_heads_is_made() -> None:
    shape = head_shape(4, 2, 16)
    transform = random_transform(shape)
    qkv = randn(3, 8 * 16, dtype=torch.float32)
    positions = torch.tensor([3, 0, 9], dtype=torch.int32, device=DEVICE)
    found = split_heads(qkv, positions, None, transform, None)
    exact = torch_heads(qkv.double(), positions, None, transform)
    for ours, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_may_go_to_several_places_or_to_none(dtype: torch.dtype) -> None:
    shape = head_shape(4, 2, 32)
    transform = random_transform(shape)
    qkv = randn(4, 8 * 32, dtype=dtype)
    positions = torch.arange(4, device=DEVICE)
    places = [[3, 17, 30], [], [0], [-1, 9]]
    indptr = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([slot for row in places for slot in row], dtype=torch.int32, device=DEVICE)
    pages = random_pages(shape, dtype)
    untouched = [each.clone() for each in pages]
    target = PageTarget(k_pages=pages[0], v_pages=pages[1], slots=slots, indptr=indptr)

    found = split_heads(qkv, positions, None, transform, target)

    for cache, before, rows in zip(pages, untouched, (found.k, found.v), strict=True):
        expected = before.flatten(0, 1).clone()
        for row, its_places in enumerate(places):
            for place in its_places:
                if place >= 0:
                    expected[place] = rows[row]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_float8_pages_hold_numbers_over_their_scale_and_saturate() -> None:
    shape = head_shape(4, 2, 64)
    table = torch.stack((torch.ones(5, 32), torch.zeros(5, 32)), dim=1).to(DEVICE)
    transform = HeadTransform(shape=shape, table=table, eps=EPS)
    # Without a rotation all numbers are integers that e4m3 holds: no rounding hides a wrong scale.
    qkv = torch.randint(-8, 9, (5, 8 * 64)).float().to(DEVICE)
    qkv[2, -64:], qkv[3, -64:] = 1e4, -1e4  # beyond 448 * scale
    positions = torch.arange(5, device=DEVICE)
    slots = torch.tensor([7, 1, 0, 2, -1], dtype=torch.int32, device=DEVICE)
    pages = random_pages(shape, torch.float8_e4m3fn, pages=2)
    target = PageTarget(k_pages=pages[0], v_pages=pages[1], slots=slots, k_scale=0.5, v_scale=2.0)
    found = split_heads(qkv, positions, None, transform, target)
    for cache, rows, scale in ((pages[0], found.k, 0.5), (pages[1], found.v, 2.0)):
        kept = cache.flatten(0, 1).float()[slots[:4].long()]
        assert torch.equal(kept, (rows[:4] / scale).clamp(-448, 448))


@pytest.mark.gpu
def test_float8_pages_round_as_torch_does() -> None:
    shape = head_shape(16, 8, 128)
    transform = random_transform(shape)
    qkv = randn(40, 32 * 128, dtype=torch.bfloat16)
    positions = torch.arange(40, device=DEVICE)
    slots = torch.arange(40, dtype=torch.int32, device=DEVICE)
    pages = random_pages(shape, torch.float8_e4m3fn, pages=10)
    target = PageTarget(k_pages=pages[0], v_pages=pages[1], slots=slots, v_scale=0.25)
    found = split_heads(qkv, positions, None, transform, target)
    for cache, rows, scale in ((pages[0], found.k, 1.0), (pages[1], found.v, 0.25)):
        expected = (rows.float() / scale).to(torch.float8_e4m3fn).float()
        assert torch.equal(cache.flatten(0, 1).float(), expected)


@pytest.mark.gpu
def test_a_captured_graph_takes_new_rows_positions_and_slots() -> None:
    shape = head_shape(16, 8, 128)
    transform = random_transform(shape)
    residual, x = randn(7, 4096, dtype=torch.bfloat16), randn(7, 4096, dtype=torch.bfloat16)
    weight, norm = randn(4096, dtype=torch.bfloat16), randn(24, 128, dtype=torch.bfloat16)
    positions = torch.zeros(7, dtype=torch.int64, device=DEVICE)
    slots = torch.full((7,), -1, dtype=torch.int32, device=DEVICE)
    pages = random_pages(shape, torch.bfloat16)
    target = PageTarget(k_pages=pages[0], v_pages=pages[1], slots=slots)

    def layer() -> tuple[Heads, Tensor]:
        normed = add_rms_norm(x, residual, weight, EPS)
        return split_heads(normed, positions, norm, transform, target), silu_mul(normed)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        heads, gated = layer()
    x.copy_(randn(7, 4096, dtype=torch.bfloat16))
    residual.copy_(randn(7, 4096, dtype=torch.bfloat16))
    positions.copy_(torch.arange(7))
    slots.copy_(torch.arange(7).flip(0) * 5)
    before = residual.clone()
    graph.replay()
    torch.cuda.synchronize()
    found = [each.clone() for each in (*heads, gated, residual, *pages)]
    residual.copy_(before)
    expected_heads, expected_gated = layer()
    expected = (*expected_heads, expected_gated, residual, *pages)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_rows_are_no_launch() -> None:
    shape = head_shape(4, 2, 16)
    empty = torch.empty(0, 8 * 16, device=DEVICE)
    positions = torch.empty(0, dtype=torch.int32, device=DEVICE)
    found = split_heads(empty, positions, None, random_transform(shape), None)
    assert found.q.shape == (0, 4, 16)
    assert rms_norm(empty, empty.new_ones(128), EPS).shape == (0, 128)
    assert silu_mul(empty).shape == (0, 64)
