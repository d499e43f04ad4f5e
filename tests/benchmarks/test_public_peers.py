"""The plan for CoDec's public kernels, computed by what those kernels do."""

import pytest
import torch
from decode_engines import CannotRun
from kernel_trees import Case, case_of, levels, make_kv, reference, repaged
from public_peers import CODEC_ROWS, CodecTables, codec_pages, codec_tables
from tests.benchmarks.bench_cases import random_tree

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.reference import masked_attention, merge_states


def run_kernels(tables: CodecTables, case: Case, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
    rows = len(tables.pages) * CODEC_ROWS
    out = torch.full((rows, *q.shape[1:]), torch.nan, dtype=torch.float64)
    lse = torch.full((rows, q.shape[1]), torch.nan, dtype=torch.float64)
    for place, (first, count, page, tokens) in enumerate(tables.pages):
        keys, values = kv.k_pages[page, :tokens], kv.v_pages[page, :tokens]
        mask = torch.ones(count, tokens, dtype=torch.bool)
        state = masked_attention(q[first : first + count], keys, values, mask, case.shape)
        span = slice(place * CODEC_ROWS, place * CODEC_ROWS + count)
        out[span], lse[span] = state
    for first, count, splits in tables.nodes:
        spans = [
            slice(first + i * CODEC_ROWS, first + i * CODEC_ROWS + count) for i in range(splits)
        ]
        whole = merge_states(
            torch.stack([out[s] for s in spans]), torch.stack([lse[s] for s in spans])
        )
        out[spans[0]], lse[spans[0]] = whole
    for level in tables.edges:
        for parent, child, count in level:
            above, below = slice(parent, parent + count), slice(child, child + count)
            whole = merge_states(
                torch.stack([out[above], out[below]]), torch.stack([lse[above], lse[below]])
            )
            out[below], lse[below] = whole
    return out[tables.leaves]


@pytest.mark.parametrize(
    "case",
    [
        case_of("one", [(-1, 40)], (4, 2, 16)),
        case_of("wide", levels([1, 20, 40], [32, 16, 5]), (4, 2, 16)),
        case_of("binary", levels([1, 2, 4, 8], [16, 16, 16, 3]), (4, 2, 16)),
        case_of("empty inner nodes", levels([1, 2, 4, 8], [32, 0, 0, 7]), (4, 2, 16)),
        case_of("empty leaves", levels([1, 2, 4], [32, 16, 0]), (4, 2, 16)),
        case_of("roots", levels([3, 9], [32, 7]), (4, 2, 16)),
        *(random_tree(seed, nodes=40) for seed in range(4)),
    ],
    ids=lambda case: case.name,
)
def test_the_plan_joins_every_partial_once(case: Case) -> None:
    torch.default_generator.manual_seed(7)
    other = repaged(case, codec_pages(case))
    kv = make_kv(case, torch.float64, "cpu")
    q = torch.randn(len(case.leaves), 4, 16, dtype=torch.float64)
    found = run_kernels(codec_tables(other.case), other.case, q, other.kv(kv))
    torch.testing.assert_close(found, reference(case, q, kv))


def test_a_request_without_a_token_is_refused() -> None:
    with pytest.raises(CannotRun, match="without any token"):
        codec_tables(case_of("nothing", [(-1, 16), (-1, 0)], (4, 2, 16)))


@pytest.mark.parametrize(("tokens", "pages"), [(51200, 1024), (4096, 1024), (256, 256), (8, 16)])
def test_pages_are_the_largest_that_the_shared_nodes_fill(tokens: int, pages: int) -> None:
    assert codec_pages(case_of("two", [(-1, tokens), (0, 5), (0, 7)], (4, 2, 16))) == pages
