"""The structured mask of multi-item attention: what a row sees follows from three small arrays."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.layout import AttentionLayout, Int32
from stemserve.kernels.torch_paths.logical_request import LogicalRequest

# Rows of a tile. A tile reads its own rows beside the prefix, masked but computed: fewer rows
# waste less, more rows need fewer calls.
TILE_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemMask:
    """One request: `context_rows` at the end of the prefix, then the items without delimiters.

    An item row sees the prefix, and the own rows from `token_pos_in_items` before it up to itself.
    The arrays are 32 bits wide, so an item has no limit of 65535 tokens.
    """

    prefix_len: int
    token_pos_in_items: Int32  # [item rows]
    max_item_len: int
    context_rows: int  # rows whose keys are in the prefix, causal, at its end

    @property
    def item_rows(self) -> int:
        return len(self.token_pos_in_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTile:
    """Rows that read the first `prefix_tokens` of the prefix and a window of own rows."""

    row_start: int  # in the request
    row_stop: int
    prefix_tokens: int
    own_start: int  # item rows; empty for rows of the context
    own_stop: int
    first_item_row: int  # item row of `row_start`; unused for rows of the context

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def own_rows(self) -> int:
        return self.own_stop - self.own_start

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.own_rows

    def mask(self, token_pos_in_items: Tensor) -> Tensor | None:  # [1, 1, rows, tokens], additive
        """What the tile hides: only its last tokens can be hidden from a row."""
        if self.rows == 1 and not self.own_rows:
            return None
        device = token_pos_in_items.device
        row = torch.arange(self.rows, device=device).unsqueeze(1)
        if self.own_rows:
            positions = token_pos_in_items[self.first_item_row : self.first_item_row + self.rows]
            token = torch.arange(self.own_start, self.own_stop, device=device)
            before = row + (self.first_item_row - token)
            hidden = (before < 0) | (before > positions.unsqueeze(1))
        else:
            hidden = torch.arange(self.rows, device=device) > row
        mask = torch.zeros(self.rows, self.tokens, device=device)
        mask[:, self.tokens - hidden.shape[1] :].masked_fill_(hidden, -torch.inf)
        return mask[None, None]


def item_mask(layout: AttentionLayout, request: LogicalRequest) -> ItemMask:
    is_item = layout.segment_is_item[request.segments]
    lengths = layout.segment_rows[request.segments[is_item]]
    starts = np.cumsum(lengths) - lengths
    return ItemMask(
        prefix_len=int(layout.chain_tokens[request.segments[0]]),
        token_pos_in_items=np.arange(lengths.sum(), dtype=np.int32)
        - np.repeat(starts, lengths).astype(np.int32),
        max_item_len=int(lengths.max(initial=0)),
        context_rows=int(layout.segment_rows[request.segments[~is_item]].sum()),
    )


def item_tiles(mask: ItemMask) -> list[ItemTile]:
    """Tiles of rows; a tile skips what lies between the prefix and its start - max_item_len."""
    blind = max(0, mask.context_rows - mask.prefix_len)  # rows before the prefix see nothing
    tiles: list[ItemTile] = []
    for start in range(blind, mask.context_rows, TILE_ROWS):
        stop = min(start + TILE_ROWS, mask.context_rows)
        tiles.append(
            ItemTile(
                row_start=start,
                row_stop=stop,
                prefix_tokens=mask.prefix_len - mask.context_rows + stop,
                own_start=0,
                own_stop=0,
                first_item_row=0,
            )
        )
    for start in range(0, mask.item_rows, TILE_ROWS):
        stop = min(start + TILE_ROWS, mask.item_rows)
        tiles.append(
            ItemTile(
                row_start=mask.context_rows + start,
                row_stop=mask.context_rows + stop,
                prefix_tokens=mask.prefix_len,
                own_start=max(0, start + 1 - mask.max_item_len),
                own_stop=stop,
                first_item_row=start,
            )
        )
    return tiles
