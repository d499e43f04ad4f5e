"""Runs of the tree kernel on poisoned buffers, and attention in float64 to compare them with.

Without a GPU the kernel runs in Triton's interpreter.
"""

import torch
from tests.kernels.codec_forests import chain_slots, random_kv

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers, DecodePlan
from stemserve.kernels.codec.division import Division
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.strategy import Phase

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIVISION = Division()
# The interpreter truncates to bfloat16, which doubles the error of a weight: 5.3e-3 (median).
BFLOAT16_ERROR = 6e-3 if DEVICE.type == "cuda" else 8e-3
ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: BFLOAT16_ERROR}


def expected(
    layout: AttentionLayout,
    q: torch.Tensor,
    kv: LayerKV,
    shape: HeadShape,
    cap: float = 0.0,
    window: int = 0,
) -> AttentionState:
    """Each row by itself, in float64."""
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for segment in range(layout.num_segments):
        slots = chain_slots(layout, segment, DEVICE)
        begin, end = (int(i) for i in layout.segment_indptr[segment : segment + 2])
        own = slice(begin, end if layout.segment_is_item[segment] else begin)
        keys, values = (
            torch.cat([pages.flatten(0, 1)[slots].double(), rows[own].double()]).transpose(0, 1)
            for pages, rows in ((kv.k_pages, kv.k_rows), (kv.v_pages, kv.v_rows))
        )
        for row in range(begin, end):
            seen = max(0, keys.shape[1] - (end - 1 - row))
            rows = q[row].double().view(shape.kv_heads, shape.group, shape.head_dim)
            visible = slice(max(0, seen - window) if window else 0, seen)
            scores = rows @ keys[:, visible].transpose(1, 2) * shape.scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            lses.append(scores.logsumexp(-1).flatten())
            weights = scores.softmax(-1) if seen else scores
            outs.append((weights @ values[:, visible]).flatten(0, 1))
    return AttentionState(torch.stack(outs).cpu(), torch.stack(lses).cpu())


def poison(plan: DecodePlan) -> None:
    plan.partial_out.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)


def run_poisoned(
    decode: CodecDecode, plan: DecodePlan, q: torch.Tensor, kv: LayerKV
) -> AttentionState:
    poison(plan)
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    decode.run_into(plan, q, kv, AttentionState(out, lse))
    return AttentionState(out, lse)


def assert_close(state: AttentionState, reference: AttentionState, limit: float) -> None:
    assert not state.out.isnan().any()
    out, lse = state.out.cpu().double(), state.lse.cpu().double()
    error = (out - reference.out).square().sum().sqrt()
    assert error <= limit * reference.out.square().sum().sqrt() + 1e-30
    seen = ~reference.lse.isneginf()
    assert torch.equal(lse.isneginf(), ~seen)
    assert (lse[seen] - reference.lse[seen]).abs().max().item() < 20 * limit if seen.any() else True


def check(
    layout: AttentionLayout,
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.float16,
    bins: int = 5,
    division: Division = DIVISION,
) -> None:
    query_heads, kv_heads, dim = heads
    shape = HeadShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    numbers = DecodeNumbers(dtype=dtype)
    decode = CodecDecode(shape, DEVICE, numbers, bins, phase=Phase.PREFILL, division=division)
    assert decode.refusal(layout) is None
    kv = random_kv(layout, shape, dtype, DEVICE)
    # A row of q is part of a row of the fused projection.
    fused = torch.randn((layout.num_rows, query_heads + 2 * kv_heads, dim)).to(dtype).to(DEVICE)
    q = fused[:, :query_heads]
    state = run_poisoned(decode, decode.plan(layout), q, kv)
    assert_close(state, expected(layout, q, kv, shape), ERROR[dtype])
