"""How the work of tree decode is divided among CTAs, and what its parts cost."""

from dataclasses import dataclass

from stemserve.kernels.codec.tiles import STEP_TOKENS
from stemserve.kernels.pricing.engine_cost import BlockEngine, Engine, TileEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which parts of CoDec's task division are in use (arXiv 2505.17694); all of them are faster.

    With `fixed_split`, pieces end at multiples of so many tokens of each row's own chain. A row's
    result is then the same bit by bit whatever else is in the batch; what branches inside a step
    of 64 tokens is read once a branch, and no node is treated as wide.
    """

    split: bool = True  # tiles are cut to pieces of about equal cost; else a CTA reads a tile
    longest_first: bool = True  # uncut tiles go to the CTA with the least to do, longest first
    parallel_reduction: bool = True  # partial results of a row are loaded together, not in turn
    max_splits: int = 128  # of one tile
    fixed_split: int = 0  # tokens; 0: pieces of about equal cost

    def __post_init__(self) -> None:
        if self.fixed_split < 0 or self.fixed_split % STEP_TOKENS:
            raise ValueError(
                f"fixed_split must be a multiple of {STEP_TOKENS} tokens, not {self.fixed_split}"
            )
        if self.max_splits < 1:
            raise ValueError(f"max_splits must be at least 1, not {self.max_splits}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCosts:
    """Costs in tokens: what as many tokens more of a tile's stream would cost (H200)."""

    piece: int = 128  # of a piece, beside its tokens
    merge: int = 128  # of a merge, and for each MERGE_ROWS rows of it
    slack: int = 45  # by which a CTA may exceed the mean with the costs of further pieces
    wide: int = STEP_TOKENS  # of a step of a node that several tiles read

    @classmethod
    def of_engine(cls, engine: Engine | None) -> "PieceCosts":
        """From C_est of the tree kernel as measured; None: it was not."""
        match engine:
            case TileEngine():
                start = engine.tile_tokens
            case BlockEngine():
                start = _start_tokens(engine)
            case None:
                return cls()
        piece = round(min(max(start, STEP_TOKENS), 4 * STEP_TOKENS))  # see docs/log.md
        return cls(piece=piece, merge=piece, slack=round(0.35 * piece))


def _start_tokens(engine: BlockEngine) -> float:
    """What a block costs where its tokens are few, in tokens of where they are many."""
    rows, short, long = engine.rows[-1], 1024, 8192
    few, many = (float(engine.block_seconds(rows, tokens)) for tokens in (short, long))
    token_seconds = max(1e-12, (many - few) / (long - short))
    return few / token_seconds - short
