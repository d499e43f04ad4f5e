"""Forests for the tests of the dense kernel: of every kind, and longer than a tile."""

import numpy as np
from tests.kernels.forests import (
    Node,
    Segment,
    items_over,
    make_layout,
    random_layout,
    random_one_prefix_layout,
)

from stemserve.kernels.layout import AttentionLayout

SPELT_OUT: dict[str, AttentionLayout] = {
    "a cold prompt": make_layout([Node(tokens=300)], [Segment(rows=300)]),
    "a cold prompt of many tiles": make_layout([Node(tokens=1187)], [Segment(rows=1187)]),
    "a chunk at the end of a long chain": make_layout([Node(tokens=1700)], [Segment(rows=1300)]),
    "a prompt with items below it": make_layout(
        [Node(tokens=1100)],
        [Segment(rows=1100), *[Segment(rows=r, is_item=True) for r in (1, 4, 130, 7, 256, 300)]],
    ),
    "a chunk over two nodes, with items below both": make_layout(
        [Node(tokens=320), Node(parent=0, tokens=100), Node(parent=0, tokens=40)],
        [
            Segment(node=1, rows=150),
            Segment(node=1, rows=3, is_item=True),
            Segment(node=2, rows=40),
            Segment(node=0, rows=5, is_item=True),
            Segment(node=2, rows=1),
        ],
    ),
    "two chunks that end in one node": make_layout(
        [Node(tokens=48)],
        [Segment(rows=20), Segment(rows=33), Segment(rows=2), Segment(rows=4, is_item=True)],
    ),
    "more rows than tokens": make_layout(
        [Node(tokens=16), Node(parent=0, tokens=5), Node(tokens=0)],
        [Segment(node=1, rows=40), Segment(node=2, rows=3), Segment(node=-1, rows=2)],
    ),
    "a row again, among items": make_layout(
        [Node(tokens=130)],
        [Segment(rows=1), *[Segment(rows=9, is_item=True)] * 20, Segment(rows=3)],
    ),
    "items of many lengths": items_over(333, [0, 1, 128, 127, 129, 0, 5, 640, 2]),
    "items without a prefix": make_layout(
        [Node(tokens=16)], [Segment(node=-1, rows=r, is_item=True) for r in (5, 200, 1)]
    ),
    "prefixes in levels, of uneven depth": make_layout(
        [
            Node(tokens=160),
            Node(parent=0, tokens=48),
            Node(parent=1, tokens=16),
            Node(parent=2, tokens=130),
            Node(parent=1, tokens=37),
            Node(tokens=0),
            Node(parent=5, tokens=70),
        ],
        [
            Segment(node=3, rows=130),
            Segment(node=3, rows=30, is_item=True),
            Segment(node=4, rows=20),
            Segment(node=0, rows=50, is_item=True),
            Segment(node=6, rows=70),
            Segment(node=6, rows=8, is_item=True),
            Segment(node=1, rows=12, is_item=True),
        ],
    ),
    "one system prompt, many short suffixes": make_layout(
        [Node(tokens=528), *[Node(parent=0, tokens=20) for _ in range(30)]],
        [Segment(node=node, rows=20) for node in range(1, 31)],
    ),
    "nothing": make_layout([Node(tokens=5)], [Segment(rows=0), Segment(rows=0, is_item=True)]),
}


def random_forest(seed: int) -> AttentionLayout:
    rng = np.random.default_rng(seed)
    page_size = (16, 1, 4)[seed % 3]
    match seed % 4:
        case 0:
            return random_layout(rng, page_size=page_size)
        case 1:
            return random_one_prefix_layout(rng, page_size=page_size)
        case _:
            return _long_forest(rng, page_size)


def _long_forest(rng: np.random.Generator, page_size: int) -> AttentionLayout:
    count = int(rng.integers(1, 6))
    parents = [int(rng.integers(-1, n)) for n in range(count)]
    nodes: list[Node] = []
    for node, parent in enumerate(parents):
        tokens = int(rng.choice([0, 30, 128, 250, 700]) + rng.integers(0, 20))
        if node in parents:
            tokens = tokens // page_size * page_size
        nodes.append(Node(parent=parent, tokens=tokens))
    segments: list[Segment] = []
    for _ in range(int(rng.integers(1, 10))):
        rows = int(rng.choice([1, 3, 17, 64, 128, 300]) + rng.integers(0, 3))
        is_item = bool(rng.random() < 0.5)
        segments.append(Segment(node=int(rng.integers(-1, count)), rows=rows, is_item=is_item))
    shuffle = rng if rng.random() < 0.5 else None
    return make_layout(nodes, segments, page_size=page_size, shuffle=shuffle)
