"""The planner in C against the one in numpy: the same tables, bit by bit."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kernels.codec_forests import PAGE, layout_of, leaves_of, levels
from tests.kernels.test_codec_tiles import FORESTS, random_forest, random_prefill

from stemserve.kernels.c_library import FLAGS, CLibraryError
from stemserve.kernels.codec import native as codec_native
from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.host_tables import HostTables, table_size, with_room
from stemserve.kernels.codec.native import SOURCES, NativePlanner
from stemserve.kernels.codec.pieces import Pieces
from stemserve.kernels.codec.planner import Planner, numpy_plan
from stemserve.kernels.codec.streams import TileStreams
from stemserve.kernels.codec.tiles import STEP_TOKENS
from stemserve.kernels.layout import AttentionLayout, Int32, int32

COSTS, DIVISION = PieceCosts(), Division()


def assert_equal(
    layout: AttentionLayout,
    group: int,
    bins: int,
    window: int = 0,
    costs: PieceCosts = COSTS,
    division: Division = DIVISION,
) -> None:
    planner = NativePlanner(group, bins, window, costs, division)
    expected = numpy_plan(layout, group, bins, window, costs, division)
    for _ in range(2):  # the second time in the memory of the first
        found = planner.plan(layout)
        assert found.size == expected.size and found.merges == expected.merges
        assert np.array_equal(found.records, expected.records)
        for kind, ours, theirs in (
            (TileStreams, found.streams, expected.streams),
            (Pieces, found.pieces, expected.pieces),
        ):
            for field in fields(kind):
                pair = getattr(ours, field.name), getattr(theirs, field.name)
                assert np.array_equal(*pair), (field.name, *pair)
        assert np.array_equal(packed(found), packed(expected))


def packed(host: HostTables) -> Int32:
    """In a buffer with room for more, whose other entries nobody writes."""
    capacity = with_room(host.size)
    flat = np.full(table_size(capacity, host.records.shape[1]), 7, np.int32)
    host.sections.pack(capacity, flat)
    return flat


@pytest.mark.parametrize("bins", [1, 4, 33])
@pytest.mark.parametrize("name", FORESTS)
def test_forests_give_the_same_tables(name: str, bins: int) -> None:
    layout = layout_of(FORESTS[name], leaves_of(FORESTS[name]))
    for group in (1, 3, 4, 16):
        assert_equal(layout, group, bins)


def random_division(rng: np.random.Generator) -> Division:
    return Division(
        split=bool(rng.random() < 0.8),
        longest_first=bool(rng.random() < 0.8),
        max_splits=int(rng.choice([1, 3, 128])),
    )


@pytest.mark.parametrize("seed", range(150))
def test_random_prefill_gives_the_same_tables(seed: int) -> None:
    rng = np.random.default_rng([seed, 11])
    piece = int(rng.integers(0, 300))
    costs = PieceCosts(piece=piece, merge=int(rng.integers(0, 300)), slack=int(rng.integers(0, 99)))
    group, bins = int(rng.integers(1, 65)), int(rng.integers(1, 60))
    window = int(rng.choice([0, 0, 1, 17, 300]))
    assert_equal(random_prefill(rng), group, bins, window, costs, random_division(rng))


@pytest.mark.parametrize("seed", range(150))
def test_random_decoding_gives_the_same_tables(seed: int) -> None:
    rng = np.random.default_rng([seed, 12])
    page = int(rng.choice([1, 8, 16, 32, 64]))
    nodes = random_forest(rng, int(rng.integers(1, 80)))
    nodes = [(parent, tokens * int(rng.choice([1, 1, 30]))) for parent, tokens in nodes]
    chosen = rng.integers(-1, len(nodes), int(rng.integers(0, 200)))
    layout = layout_of(nodes, [(int(node), 1) for node in chosen], page, rng)
    group, bins = int(rng.choice([1, 2, 4, 5, 7, 8])), int(rng.integers(1, 70))
    assert_equal(layout, group, bins, int(rng.choice([0, 0, 100])), division=random_division(rng))


@pytest.mark.parametrize(
    "widths", [([1, 64], [8192, 256]), ([2, 80], [20000, 30]), ([1, 2, 90], [9000, 4096, 100])]
)
def test_wide_nodes_give_the_same_tables(widths: tuple[list[int], list[int]]) -> None:
    nodes = levels(*widths)
    for bins in (5, 33, 66):
        for cost in (STEP_TOKENS, 48, 7):
            layout = layout_of(nodes, leaves_of(nodes))
            assert_equal(layout, 4, bins, costs=PieceCosts(wide=cost))


def test_a_long_prefix_of_the_same_step_gives_the_same_tables() -> None:
    segments = [(0, 3000), *[(0, 20)] * 5]
    layout = layout_of([(-1, 3100)], segments, items=[False, *[True] * 5])
    assert_equal(layout, 4, 33)


def test_a_layout_of_nothing_has_tables() -> None:
    assert_equal(layout_of([], []), 4, 33)
    assert_equal(layout_of([(-1, 40)], []), 4, 33)


BROKEN: dict[str, dict[str, Any]] = {
    "a parent after its child": {"node_parent": int32([1, -1, 0])},
    "a parent that is no node": {"node_parent": int32([-1, 0, -2])},
    "more tokens than pages": {"node_tokens": int32([64, 1000, 5])},
    "negative tokens": {"node_tokens": int32([64, -1, 5])},
    "pages beyond the list": {"node_page_indptr": int32([0, 4, 6, 9])},
    "pages that go back": {"node_page_indptr": int32([0, 4, 3, 7])},
    "a negative page": {"node_pages": int32([-1] * 7)},
    "a page number beyond 24 bits": {"node_pages": int32([1 << 24] * 7)},
    "a segment of no node": {"segment_node": int32([1, 3])},
    "rows that go back": {"segment_indptr": int32([0, 2, 1])},
    "too few segments": {"segment_indptr": int32([0, 2])},
    "too few nodes": {"node_tokens": int32([64, 20])},
    "pages of three tokens": {"page_size": 3},
    "more rows than a word can number": {"segment_indptr": int32([0, 1, 1 << 24])},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layout_is_refused_before_anything_is_read(name: str) -> None:
    good = layout_of([(-1, 64), (0, 20), (0, 5)], [(1, 1), (2, 1)])
    values: dict[str, Any] = {f.name: getattr(good, f.name) for f in fields(good)} | BROKEN[name]
    planner = NativePlanner(4, 33, 0, COSTS, DIVISION)
    with pytest.raises(ValueError, match=r"cannot be planned|differ in length"):
        planner.plan(AttentionLayout(**values))
    planner.plan(good)


def test_impossible_settings_are_refused() -> None:
    layout = layout_of([(-1, 64)], [(0, 1)], PAGE)
    for group, bins in ((0, 3), (65, 3), (4, 0)):
        with pytest.raises(ValueError, match="settings"):
            NativePlanner(group, bins, 0, COSTS, DIVISION).plan(layout)


def test_tables_that_do_not_fit_are_not_written() -> None:
    small, large = (layout_of([(-1, tokens)], [(0, 1)], PAGE) for tokens in (64, 6400))
    planner = NativePlanner(4, 33, 0, COSTS, DIVISION)
    host, capacity = planner.plan(large), planner.plan(small).size
    flat = np.zeros(table_size(host.size, host.records.shape[1]), np.int32)
    for room, entries in ((capacity, flat), (host.size, flat[1:])):
        with pytest.raises(ValueError, match="does not fit"):
            host.sections.pack(room, entries)
    assert not flat.any()


def test_without_a_library_plans_are_made_in_numpy_counted_and_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise CLibraryError("no C compiler")

    monkeypatch.setattr(codec_native, "planner_library", fail)
    planner = Planner(group=4, bins=33, window=0, costs=COSTS, division=DIVISION)
    layouts = [layout_of([(-1, tokens)], [(0, 1)]) for tokens in (64, 20)]
    for layout in layouts:
        assert np.array_equal(
            planner.plan(layout).records, numpy_plan(layout, 4, 33, 0, COSTS, DIVISION).records
        )
    assert planner.numpy_plans == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C compiler" in caplog.text


def test_work_and_plan_of_a_layout_make_one_plan() -> None:
    planner = Planner(group=4, bins=33, window=0, costs=COSTS, division=DIVISION)
    layout = layout_of([(-1, 64)], [(0, 1)])
    told = planner.plan(layout)
    assert planner.take(layout) is told
    assert planner.take(layout) is not told
    assert planner.numpy_plans == 0


SANITIZED = """
import ctypes, sys
sys.path.append(sys.argv[2])
from tests.kernels import test_codec_native as tests
from stemserve.kernels.codec import native as codec_native
library = codec_native.declared(ctypes.CDLL(sys.argv[1]))
codec_native.planner_library = lambda: library
for seed in range(25):
    tests.test_random_prefill_gives_the_same_tables(seed)
    tests.test_random_decoding_gives_the_same_tables(seed)
for name in tests.BROKEN:
    tests.test_a_broken_layout_is_refused_before_anything_is_read(name)
tests.test_wide_nodes_give_the_same_tables(([1, 64], [8192, 256]))
tests.test_a_layout_of_nothing_has_tables()
print("clean")
"""


def test_no_access_goes_beyond_an_array(tmp_path: Path) -> None:
    """The comparisons again, with sanitizers, and arrays of just the size that a plan needs."""
    runtime = sanitizer_runtime()
    library = tmp_path / "planner.so"
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    files = [str(source) for source in SOURCES if source.suffix == ".c"]
    command = ["gcc", *FLAGS, *flags, "-DEXACT_ARRAYS", *files, "-o", str(library)]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(library), str(Path(__file__).parents[2])],
        env=os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]


def sanitizer_runtime() -> str:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("needs gcc's address sanitizer")
    return found.stdout.strip()
