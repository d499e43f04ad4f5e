"""The forest of a step, unfolded again and compared with the chains it was made of."""

import numpy as np
import pytest

from stemserve.service.batching.steps.prefix_forest import (
    ForestMemory,
    PrefixForest,
    StoredChain,
    build_forest,
)
from stemserve.service.request import Int32

PAGE = 4


def chain(tokens: int, *pages: int) -> StoredChain:
    return StoredChain(np.array(pages, np.int32), tokens)


def nodes_above(forest: PrefixForest, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(forest.node_parent[node])
    return path


def pages_of(forest: PrefixForest, node: int) -> Int32:
    first, end = forest.node_page_indptr[node : node + 2]
    return forest.node_pages[first:end]


def random_chains(rng: np.random.Generator) -> list[StoredChain]:
    chains: list[StoredChain] = []
    for _ in range(rng.integers(1, 12)):
        pages = rng.integers(100, 200, 6).astype(np.int32)
        if chains and rng.random() < 0.8:
            other = chains[rng.integers(len(chains))].pages
            keep = rng.integers(7)
            pages = np.concatenate([other[:keep], pages])[:6]
        chains.append(StoredChain(pages, int(rng.integers(1, 6 * PAGE + 1))))
    return chains


@pytest.mark.parametrize("seed", range(60))
def test_unfolded_nodes_spell_the_chains(seed: int) -> None:
    chains = random_chains(np.random.default_rng(seed))
    forest = build_forest(chains, PAGE)
    has_child = set(forest.node_parent.tolist())
    for wanted, leaf in zip(chains, forest.chain_node, strict=True):
        path = nodes_above(forest, int(leaf))
        pages = np.concatenate([pages_of(forest, node) for node in path])
        assert pages.tolist() == wanted.pages[: -(-wanted.tokens // PAGE)].tolist()
        assert forest.node_tokens[path].sum() == wanted.tokens
    for node, tokens in enumerate(forest.node_tokens.tolist()):
        assert len(pages_of(forest, node)) == -(-tokens // PAGE) > 0
        assert tokens % PAGE == 0 or node not in has_child
        assert forest.node_parent[node] < node


@pytest.mark.parametrize("seed", range(60))
def test_whole_pages_that_chains_share_are_in_one_node(seed: int) -> None:
    """As many page entries as there are distinct ways to begin a chain."""
    chains = random_chains(np.random.default_rng(seed))
    forest = build_forest(chains, PAGE)
    beginnings = {
        (*item.pages[:full].tolist(), PAGE)
        for item in chains
        for full in range(1, item.tokens // PAGE + 1)
    }
    beginnings |= {
        (*item.pages[: item.tokens // PAGE + 1].tolist(), item.tokens % PAGE)
        for item in chains
        if item.tokens % PAGE
    }
    assert len(forest.node_pages) == len(beginnings)


def test_nodes_come_depth_first() -> None:
    forest = build_forest(
        [chain(12, 1, 2, 3), chain(8, 9, 8), chain(12, 1, 2, 4), chain(5, 1, 2), chain(4, 1)], PAGE
    )
    path: list[int] = []
    for node, parent in enumerate(forest.node_parent.tolist()):
        while path and path[-1] != parent:
            path.pop()
        assert parent == (path[-1] if path else -1)
        path.append(node)
    assert len(forest.node_parent) == 6


def test_equal_chains_end_in_one_node_and_a_shorter_one_in_its_parent() -> None:
    forest = build_forest([chain(10, 1, 2, 3), chain(10, 1, 2, 3), chain(8, 1, 2)], PAGE)
    assert forest.chain_node.tolist() == [1, 1, 0]
    assert forest.node_tokens.tolist() == [8, 2]


def test_one_page_read_to_different_lengths_is_several_leaves() -> None:
    forest = build_forest([chain(6, 1, 2), chain(7, 1, 2), chain(8, 1, 2)], PAGE)
    assert forest.node_tokens.tolist() == [4, 2, 3, 4]
    assert sorted(forest.node_pages.tolist()) == [1, 2, 2, 2]


def test_no_chains_make_an_empty_forest() -> None:
    forest = build_forest([], PAGE)
    assert forest.node_page_indptr.tolist() == [0] and not len(forest.node_tokens)


def test_samples_over_a_long_prompt_share_one_root() -> None:
    prompt = np.arange(512, dtype=np.int32)
    chains = [
        StoredChain(np.append(prompt, np.int32(1000 + i)), 512 * PAGE + 1 + i % 3)
        for i in range(128)
    ]
    forest = build_forest(chains, PAGE)
    assert forest.node_parent.tolist() == [-1] + [0] * 128
    assert forest.node_tokens[0] == 512 * PAGE


@pytest.mark.parametrize("seed", range(40))
def test_chains_that_grow_in_their_own_pages_make_the_same_forest_from_memory(seed: int) -> None:
    """Rows come, grow and go; now and then a chain without pages of its own is among them."""
    rng = np.random.default_rng(seed)
    memory, rows, next_page = ForestMemory(PAGE), list[StoredChain](), 1000
    for _ in range(12):
        if len(rows) < 2 or rng.random() < 0.5:
            trunk = rng.integers(0, 3, 2).tolist()
            shared = [100 * trunk[0] + n for n in range(trunk[1])]
            pages = np.array([*shared, *range(next_page, next_page + 9)], np.int32)
            next_page += 9
            own_key = pages[: len(shared) + 1].tobytes()
            rows.append(StoredChain(pages, len(shared) * PAGE + 1, own_key))
        elif rng.random() < 0.3:
            del rows[rng.integers(len(rows))]
        rows = [row._replace(tokens=row.tokens + int(rng.integers(1, 4))) for row in rows]
        others = [chain(int(rng.integers(1, 9)), 0, 1)] if rng.random() < 0.3 else []
        plain = [row._replace(own_key=b"") for row in rows] + others
        found, wanted = memory.build(rows + others), build_forest(plain, PAGE)
        for item, leaf, other in zip(plain, found.chain_node, wanted.chain_node, strict=True):
            spelled = np.concatenate(
                [pages_of(found, node) for node in nodes_above(found, int(leaf))]
            )
            assert spelled.tolist() == item.pages[: -(-item.tokens // PAGE)].tolist()
            assert found.node_tokens[leaf] == wanted.node_tokens[other]
        assert sorted(found.node_pages.tolist()) == sorted(wanted.node_pages.tolist())
        assert (found.node_parent < np.arange(len(found.node_parent))).all()


@pytest.mark.parametrize("tokens", [1, 3, PAGE, PAGE + 1, 3 * PAGE])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_segments_that_read_the_same_share_one_node(tokens: int, count: int) -> None:
    pages = np.array([7, 3, 9, 4], np.int32)
    forest = ForestMemory(PAGE).build([StoredChain(pages, tokens)] * count)
    wanted = build_forest([StoredChain(pages.copy(), tokens) for _ in range(count)], PAGE)
    for name in ("node_parent", "node_page_indptr", "node_pages", "node_tokens", "chain_node"):
        found, other = getattr(forest, name), getattr(wanted, name)
        assert found.tolist() == other.tolist()
        assert found.dtype == other.dtype == np.int32
