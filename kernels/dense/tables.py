"""Numbers that the dense kernel and its plan agree on: tiles of rows, and blocks of tokens.

A tile is `TILE_ROWS` rows of the step that follow each other. It has a range of blocks that other
tiles may have too, and then a range of its own:

    row, rows, first shared block, shared blocks, first own block, own blocks, row of the result

A result goes to the rows themselves, or where a tile is divided to partial rows after them all.

An item is a tile for one query head; a CTA has items that follow each other. One without blocks is
no item.

    the fields of the tile, query head

A block is up to `BLOCK_TOKENS` tokens that lie together, among the step's own rows or in a copy:

    where they start, their place in the chain, how many there are, flags
"""

TILE_ROWS = 128
TILE_FIELDS = 7
ITEM_FIELDS = 8
BLOCK_TOKENS = 128
BLOCK_FIELDS = 4

COPIED = 1  # the tokens are in the copy
MASKED = 2  # some rows do not see all of them
OWN = 4  # row r sees the rows row_first[r] .. r; else tokens before row_seen[r] in the chain
