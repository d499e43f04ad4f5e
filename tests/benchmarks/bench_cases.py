"""Small trees for tests of the benchmarks, some with what engines find hard."""

import numpy as np
from kernel_trees import Case, Heads, Nodes, case_of

SMALL_HEADS: Heads = (4, 2, 16)


def random_tree(seed: int, nodes: int = 24, longest: int = 50) -> Case:
    """Several roots, empty nodes, nodes of one token, lengths that fill no page."""
    rng = np.random.default_rng(seed)
    tree: Nodes = []
    for node in range(nodes):
        parent = -1 if node == 0 else int(rng.integers(-1, node))
        tokens = int(rng.choice([0, 1, int(rng.integers(2, longest)), 16, 32]))
        tree.append((parent, tokens if parent >= 0 else tokens + 1))
    return case_of(f"random {seed}", tree, SMALL_HEADS)
