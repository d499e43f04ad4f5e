"""Shapes of prefill: items over one prefix, as the survey's grid has them and drawn at random."""

from dataclasses import dataclass

import numpy as np

from stemserve.kernels.layout import AttentionLayout, HeadShape, int32

PAGE_TOKENS = 16
HEAD_DIM = 128
HEADS = ((16, 8), (32, 8), (28, 4))
MOST_PREFIX, MOST_ITEM, MOST_ITEMS, MOST_ITEM_ROWS = 32768, 1024, 512, 65536
BYTES_A_SECOND, FLOPS_A_SECOND = 4.3e12, 790e12


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
    prefix: int  # tokens
    item: int  # tokens of each item
    items: int
    query_heads: int
    kv_heads: int
    cached: bool  # only the items are computed; else the prefix too, in the same call
    grid: bool = False  # of the survey, not drawn

    @property
    def heads(self) -> HeadShape:
        return HeadShape(
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
        )

    @property
    def rows(self) -> int:
        return self.items * self.item + (0 if self.cached else self.prefix)

    @property
    def pairs(self) -> int:
        """Of a row and a token that it sees."""
        item = self.item * self.prefix + self.item * (self.item + 1) // 2
        prefix = 0 if self.cached else self.prefix * (self.prefix + 1) // 2
        return self.items * item + prefix

    @property
    def flops(self) -> int:
        return 4 * HEAD_DIM * self.query_heads * self.pairs

    @property
    def floor_us(self) -> float:
        tokens = self.prefix + self.items * self.item
        heads = tokens * self.kv_heads + self.rows * self.query_heads
        read = 4 * HEAD_DIM * heads  # K, V, q and the result, 16 bits each
        return max(read / BYTES_A_SECOND, self.flops / FLOPS_A_SECOND) * 1e6

    def layout(self) -> AttentionLayout:
        """One stored prefix; its own rows, if computed, and then the items."""
        own = [] if self.cached else [self.prefix]
        rows = own + [self.item] * self.items
        return _layout([self.prefix], rows, [0] * len(rows), [False] * len(own))

    def full_prompts(self) -> AttentionLayout:
        """What a server without sharing computes: every item's whole prompt, by itself."""
        count = max(1, self.items)
        tokens = [self.prefix + self.item] * count
        return _layout(tokens, tokens, list(range(count)), [False] * count)


def _layout(
    nodes: list[int], rows: list[int], segment_node: list[int], stored: list[bool]
) -> AttentionLayout:
    """Segments beyond those of `stored` are items. Pages are in random order."""
    pages = np.array([-(-tokens // PAGE_TOKENS) for tokens in nodes])
    indptr = np.concatenate([[0], np.cumsum(pages)])
    order = np.random.default_rng(len(rows)).permutation(int(indptr[-1]))
    return AttentionLayout(
        page_size=PAGE_TOKENS,
        node_parent=np.full(len(nodes), -1, np.int32),
        node_page_indptr=int32(indptr),
        node_pages=int32(order),
        node_tokens=int32(nodes),
        segment_indptr=int32(np.concatenate([[0], np.cumsum(rows)])),
        segment_node=int32(segment_node),
        segment_is_item=np.arange(len(rows)) >= len(stored),
    )


def survey_grid() -> list[PrefillShape]:
    """P in {96, 8196}, S in {4, 256}, M in {2, 32}, prefix not cached; and one prompt alone."""
    sizes = [(p, s, m) for p in (96, 8196) for s in (4, 256) for m in (2, 32)]
    return [
        PrefillShape(prefix=p, item=s, items=m, query_heads=16, kv_heads=8, cached=False, grid=True)
        for p, s, m in [*sizes, (8196, 0, 0)]
    ]


def random_shapes(count: int, seed: int) -> list[PrefillShape]:
    """Sizes uniform in their logarithms, within what a step's limits allow."""
    rng = np.random.default_rng(seed)
    shapes: list[PrefillShape] = []
    while len(shapes) < count:
        prefix, item, items = (
            int(np.exp(rng.uniform(0, np.log(most + 1))))
            for most in (MOST_PREFIX, MOST_ITEM, MOST_ITEMS)
        )
        query_heads, kv_heads = HEADS[int(rng.integers(len(HEADS)))]
        if item * items <= MOST_ITEM_ROWS:
            shapes.append(
                PrefillShape(
                    prefix=prefix,
                    item=item,
                    items=items,
                    query_heads=query_heads,
                    kv_heads=kv_heads,
                    cached=bool(rng.integers(2)),
                )
            )
    return shapes
