"""Tiles of 64 query rows, and the words in which a plan tells them what to read.

Rows are taken in depth-first order, so that the rows below a node are consecutive. Rows times
query heads of one KV head are packed into tiles of 64 rows.
"""

import numpy as np

from stemserve.kernels.codec.rows import RowRuns
from stemserve.kernels.layout import Int32

TILE_ROWS = 64
STEP_TOKENS = 64  # tokens of one step of the kernel's loop
PAGE_SIZES = (8, 16, 32, 64)  # a step reads whole pages, and tiles have powers of two
PAGE_BITS = 24  # of a page word: the page number; above it, how many of its tokens to load
TOKEN_BITS = 7  # of these
OWN_ROWS = np.int32(-(1 << 31))  # of a page word: it numbers the first of some of the step's rows
MASKED = 1 << 28  # of some mask word of a step: not every row sees every token
CAUSAL = 1 << 23  # of a mask word: each row sees one token more than the row before


def loaded_tokens(words: Int32) -> Int32:  # as `words`, of any shape
    """Tokens that each page word has loaded."""
    tokens: Int32 = words >> PAGE_BITS & ((1 << TOKEN_BITS) - 1)
    return tokens


def tile_cuts(runs: RowRuns, per_tile: int) -> Int32:  # [tiles + 1] rows
    """Tile borders: at most `per_tile` rows a tile, where the fewest pages are read twice."""
    rows = len(runs.rows)
    shared = runs.high - runs.low > 1
    low, high, pages = runs.low[shared], runs.high[shared], runs.pages[shared]
    torn = np.bincount(low + 1, pages, rows + 2) - np.bincount(high, pages, rows + 2)
    cost = np.cumsum(torn).tolist()
    cuts = [0]
    slack = max(1, per_tile // 4)
    while rows - cuts[-1] > per_tile:
        latest = cuts[-1] + per_tile
        window = cost[latest : latest - slack : -1]
        cuts.append(latest - window.index(min(window)))
    return np.array([*cuts, rows], np.int32)
