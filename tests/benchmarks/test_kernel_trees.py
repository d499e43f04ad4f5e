from pathlib import Path

import kernel_trees
import numpy as np
import pytest
import torch
from kernel_trees import (
    TREES_FILE,
    TreeFileError,
    case_of,
    file_cases,
    make_kv,
    node_slots,
    reference,
    repaged,
    table_cases,
)
from tests.benchmarks.bench_cases import SMALL_HEADS, random_tree

from stemserve.kernels import reference as oracle


def test_the_shipped_file_holds_the_86_trees() -> None:
    cases = file_cases(TREES_FILE)
    assert len(cases) == 86
    assert len({case.name for case in cases}) == 86
    assert sum(case.floor_us >= 20 for case in cases) == 41


def test_floors_of_the_first_table_are_unique_bytes_at_full_rate() -> None:
    cases = {case.name: case for case in table_cases()}
    first = cases["1 x 51200 + 16 x 512"]
    kv_bytes = 2 * 2 * 8 * 128 * (51200 + 16 * 512)
    rows_bytes = 2 * 2 * 16 * 32 * 128
    assert first.floor_us == pytest.approx((kv_bytes + rows_bytes) / 4.3e12 * 1e6)
    assert first.share == pytest.approx(13.9, abs=0.05)
    assert len(first.leaves) == 16


@pytest.mark.parametrize("seed", range(6))
def test_the_reference_is_the_oracle_of_the_kernels(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    case = random_tree(seed)
    kv = make_kv(case, torch.float32, "cpu")
    q = torch.randn(len(case.leaves), case.shape.query_heads, case.shape.head_dim)
    expected = oracle.attention(case.layout, q, kv, case.shape).out
    torch.testing.assert_close(reference(case, q, kv), expected)


def test_the_reference_takes_chains_that_exceed_its_share_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_trees, "REFERENCE_BYTES", 1)
    case = random_tree(1)
    kv = make_kv(case, torch.float32, "cpu")
    q = torch.randn(len(case.leaves), case.shape.query_heads, case.shape.head_dim)
    expected = oracle.attention(case.layout, q, kv, case.shape).out
    torch.testing.assert_close(reference(case, q, kv), expected)


@pytest.mark.parametrize("page_tokens", [8, 16, 64])
@pytest.mark.parametrize("seed", range(6))
def test_whole_pages_hold_the_same_chains(seed: int, page_tokens: int) -> None:
    torch.default_generator.manual_seed(seed)
    case = random_tree(seed)
    other = repaged(case, page_tokens)
    inner = {parent for parent, _ in other.case.nodes if parent >= 0}
    assert all(other.case.nodes[node][1] % page_tokens == 0 for node in inner)
    kv = make_kv(case, torch.float32, "cpu")
    q = torch.randn(len(case.leaves), case.shape.query_heads, case.shape.head_dim)
    whole = reference(other.case, q, other.kv(kv))
    torch.testing.assert_close(whole, reference(case, q, kv))


def test_pages_that_are_whole_already_are_not_copied() -> None:
    case = case_of("two", [(-1, 32), (0, 5), (0, 0)], SMALL_HEADS)
    assert repaged(case, 16).source is None


def test_rows_are_the_leaves_depth_first() -> None:
    case = case_of("mixed", [(-1, 1), (0, 1), (0, 1), (1, 1), (-1, 1)], SMALL_HEADS)
    assert case.leaves == [3, 2, 4]


def test_node_slots_stop_at_the_tokens() -> None:
    layout = case_of("one", [(-1, 20)], SMALL_HEADS).layout
    slots = node_slots(layout, 0)
    assert len(slots) == 20
    assert np.array_equal(slots[16:] % 16, np.arange(4))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"a": {"heads": [4, 2, 16]}}',
        '{"a": {"heads": [4, 2], "nodes": [[-1, 1]]}}',
        '{"a": {"heads": [4, 2, 16], "nodes": [[0, 1]]}}',
        '{"a": {"heads": [4, 2, 16], "nodes": [[-1, -1]]}}',
        '{"a": {"heads": [4, 3, 16], "nodes": [[-1, 1]]}}',
    ],
)
def test_a_file_of_another_format_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trees.json"
    path.write_text(text)
    with pytest.raises(TreeFileError):
        file_cases(path)
