"""The host plan of tree decode, emulated in numpy and compared with attention row by row."""

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.codec_forests import PAGE, Nodes, layout_of, leaves_of, levels

from stemserve.kernels.codec.pieces import RECORD, Pieces, divide, records
from stemserve.kernels.codec.streams import TileStreams, tile_streams
from stemserve.kernels.codec.tiles import (
    CAUSAL,
    MASKED,
    PAGE_BITS,
    STEP_TOKENS,
    TILE_ROWS,
)
from stemserve.kernels.layout import AttentionLayout

FORESTS: dict[str, Nodes] = {
    "one token": [(-1, 1)],
    "one long chain": [(-1, 256), (0, 256), (1, 65)],
    "a fan": levels([1, 21], [100, 20]),
    "a wide fan": levels([1, 300], [512, 3]),
    "empty inner nodes": levels([1, 2, 4, 8], [256, 0, 0, 33]),
    "empty leaves": levels([1, 40], [256, 0]),
    "binary": levels([1, 2, 4, 8, 16, 32], [48] * 6),
    "one-page levels": levels([1, 2, 4, 8, 16, 128], [16] * 6),
    "several roots": levels([5, 10, 70], [64, 16, 17]),
    "no sharing": [(-1, 130)] * 9,
    "degenerate": [(node - 2 + node % 2, 32) if node > 1 else (node - 1, 32) for node in range(12)],
    "uneven": [(-1, 777), (0, 5), (0, 333), (0, 0), (2, 100), (2, 64), (-1, 1), (6, 1), (-1, 16)],
    "an empty root": [(-1, 0), (0, 77), (0, 5)],
}


def seen_tokens(layout: AttentionLayout, window: int = 0) -> list[list[int]]:
    """For each row the page slots (page * page size + slot) that it sees; own row r is -1 - r."""
    rows: list[list[int]] = []
    for segment in range(layout.num_segments):
        slots: list[int] = []
        for node in layout.chain(int(layout.segment_node[segment])):
            tokens = np.arange(int(layout.node_tokens[node]))
            pages = layout.pages(node)[tokens // layout.page_size]
            slots += (pages * layout.page_size + tokens % layout.page_size).tolist()
        count, first = int(layout.segment_rows[segment]), int(layout.segment_indptr[segment])
        if layout.segment_is_item[segment]:
            slots += [-1 - row for row in range(first, first + count)]
        rows += [slots[: max(0, len(slots) - count + 1 + row)][-window:] for row in range(count)]
    return rows


def emulate(
    streams: TileStreams, table: NDArray[np.int32], group: int, page: int, bins: int
) -> tuple[dict[int, list[int]], list[list[int]]]:
    """The slots that each partial row and each directly written row takes in."""
    per_step = STEP_TOKENS // page
    partial: dict[int, list[int]] = {}
    direct: list[list[int]] = [[] for _ in streams.rows]
    for start in range(bins):
        piece = start
        while piece >= 0:
            record: list[int] = table[piece][:9].tolist()
            row0, rows, steps, first, offset, low, high, is_direct, piece = record
            seen: list[list[int]] = [[] for _ in range(rows)]
            for at in range(first * per_step, (first + steps) * per_step):
                word, mask = int(streams.words[at]), int(streams.masks[at])
                number, loaded = word & ((1 << PAGE_BITS) - 1), word >> PAGE_BITS & 127
                a, b, whole = mask & 255, mask >> 8 & 255, mask >> 16 & 127
                begin = at // per_step * per_step
                masked = int(streams.masks[begin : begin + per_step].max()) >= MASKED
                a, b = (a, b) if masked else (0, TILE_ROWS)
                for row in range(a, min(b, rows)):
                    more = row // group - a // group if mask & CAUSAL else 0
                    tokens = min(page, whole + more) if masked else page
                    assert tokens <= loaded
                    skip = 0
                    if masked and len(streams.starts):
                        start = int(streams.starts[row0 + row // group])
                        skip = max(0, start - int(streams.positions[at]))
                    if word < 0:
                        seen[row] += [-1 - number - token for token in range(skip, tokens)]
                    else:
                        seen[row] += range(number * page + skip, number * page + tokens)
            for row in range(low, high):
                if not is_direct:
                    partial[int(offset) + row] = seen[row]
                elif row % group == 0:
                    direct[row0 + row // group] += seen[row]
    return partial, direct


def check(
    layout: AttentionLayout, group: int, bins: int, window: int = 0
) -> tuple[TileStreams, Pieces]:
    streams = tile_streams(layout, group, bins, window)
    pieces = divide(streams, group, layout.page_size, bins)
    check_tables(layout, streams, pieces, group, bins, window)
    return streams, pieces


def check_tables(
    layout: AttentionLayout,
    streams: TileStreams,
    pieces: Pieces,
    group: int,
    bins: int,
    window: int = 0,
) -> None:
    """Each row takes in what it sees, once, whichever pieces bring it."""
    table = records(streams, pieces, group, bins, STEP_TOKENS // layout.page_size)
    partial, direct = emulate(streams, table, group, layout.page_size, bins)
    expected = seen_tokens(layout, window)
    assert np.array_equal(np.sort(streams.rows), np.arange(layout.num_rows))
    rows: list[int] = streams.rows.tolist()
    for place, row in enumerate(rows):
        count = int(pieces.merge_count[place])
        if count < 0:
            assert sorted(direct[place]) == sorted(expected[row])
            continue
        for head in range(group):
            entries: list[int] = pieces.merge[place, :count].tolist()
            merged = [slot for entry in entries for slot in partial[entry + head]]
            assert sorted(merged) == sorted(expected[row])
    assert int(np.diff(streams.cuts).max()) * group <= TILE_ROWS
    assert pieces.bin.max(initial=0) < bins
    assert max(partial, default=-1) < pieces.partial_rows or not partial


@pytest.mark.parametrize("bins", [1, 4, 33])
@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("name", FORESTS)
def test_each_row_sees_its_chain_once(name: str, group: int, bins: int) -> None:
    layout = layout_of(FORESTS[name], leaves_of(FORESTS[name]), rng=np.random.default_rng(bins))
    check(layout, group, bins)


@pytest.mark.parametrize("page", [8, 32, STEP_TOKENS])
def test_any_page_size_up_to_a_step_works(page: int) -> None:
    nodes = levels([2, 6, 30], [128, 64, 41])
    check(layout_of(nodes, leaves_of(nodes), page, np.random.default_rng(page)), 4, 9)


def random_forest(rng: np.random.Generator, size: int) -> Nodes:
    nodes: Nodes = []
    for node in range(size):
        parent = int(rng.integers(-1, node)) if node and rng.random() < 0.95 else -1
        nodes.append((parent, int(rng.choice([0, 1, 15, 16, 17, 48, 200]))))
    return nodes


@pytest.mark.parametrize("seed", range(30))
def test_random_forests_in_any_segment_order(seed: int) -> None:
    """Segments hang below inner nodes too, twice below one node, and below none."""
    rng = np.random.default_rng([seed, 7])
    nodes = random_forest(rng, int(rng.integers(1, 60)))
    chosen = rng.integers(-1, len(nodes), int(rng.integers(1, 80)))
    layout = layout_of(nodes, [(int(node), 1) for node in chosen], rng=rng)
    check(layout, int(rng.choice([1, 2, 4, 5, 7, 8])), int(rng.integers(1, 40)))


@pytest.mark.parametrize("seed", range(30))
def test_segments_of_several_rows_are_causal(seed: int) -> None:
    rng = np.random.default_rng([seed, 8])
    nodes = random_forest(rng, int(rng.integers(1, 20)))
    leaves = [node for node, _ in leaves_of(nodes)]
    nodes = [(p, t + 40 if n in leaves else t // PAGE * PAGE) for n, (p, t) in enumerate(nodes)]
    segments = [(node, int(rng.integers(1, 38))) for node in rng.permutation(leaves).tolist()]
    check(layout_of(nodes, segments, rng=rng), int(rng.choice([1, 4, 5])), int(rng.integers(1, 40)))


def random_prefill(rng: np.random.Generator) -> AttentionLayout:
    """Segments of every kind below any nodes, as long as they like, and some without rows."""
    nodes = random_forest(rng, int(rng.integers(1, 20)))
    inner = {parent for parent, _ in nodes}
    nodes = [(p, t // PAGE * PAGE if n in inner else t) for n, (p, t) in enumerate(nodes)]
    segments = [
        (int(rng.integers(-1, len(nodes))), int(rng.choice([0, 1, 1, 2, 5, 16, 33, 70])))
        for _ in range(int(rng.integers(1, 30)))
    ]
    items = [bool(rng.random() < 0.5) for _ in segments]
    return layout_of(nodes, segments, rng=rng, items=items)


@pytest.mark.parametrize("seed", range(60))
def test_items_and_chunks_of_prefixes_share_a_forest(seed: int) -> None:
    rng = np.random.default_rng([seed, 10])
    group, bins = int(rng.choice([1, 4, 5, 8])), int(rng.integers(1, 40))
    check(random_prefill(rng), group, bins, int(rng.choice([0, 0, 1, 30, 200])))


@pytest.mark.parametrize("window", [1, 20, 100, 1000])
@pytest.mark.parametrize("seed", range(10))
def test_a_window_hides_the_first_tokens(seed: int, window: int) -> None:
    rng = np.random.default_rng([seed, 9])
    nodes = random_forest(rng, int(rng.integers(1, 40)))
    leaves = [node for node, _ in leaves_of(nodes)]
    nodes = [(p, t + 20 if n in leaves else t // PAGE * PAGE) for n, (p, t) in enumerate(nodes)]
    segments = [(node, int(rng.integers(1, 20))) for node in rng.permutation(leaves).tolist()]
    streams, _ = check(layout_of(nodes, segments, rng=rng), 4, int(rng.integers(1, 40)), window)
    whole, _ = check(layout_of(nodes, segments, rng=rng), 4, 8)
    assert len(streams.words) <= len(whole.words)


@pytest.mark.parametrize("name", ["binary", "no sharing", "several roots"])
def test_shares_differ_by_little(name: str) -> None:
    nodes = [(parent, tokens * 8) for parent, tokens in FORESTS[name]]
    _, pieces = check(layout_of(nodes, leaves_of(nodes), rng=np.random.default_rng(33)), 4, 33)
    load = np.bincount(pieces.bin, pieces.steps + 0.3, 33)
    assert load.max() <= load.mean() * 1.15 + 1.5


def test_wide_nodes_are_cut_alike_for_all_their_tiles() -> None:
    nodes = levels([1, 64], [8192, 256])
    layout = layout_of(nodes, leaves_of(nodes), rng=np.random.default_rng(64))
    streams, pieces = check(layout, 4, 33)
    assert streams.num_wide == 1
    root = pieces.first < streams.region_step[1]
    starts = [pieces.first[root & (pieces.tile == tile)].tolist() for tile in range(4)]
    assert starts[0] == starts[1] == starts[2] == starts[3]
    assert pieces.tokens[root].sum() == 4 * 8192
    assert pieces.tokens[~root].sum() == 64 * 256
    assert records(streams, pieces, 4, 33, 4).shape[1] == RECORD + 8 + 16
