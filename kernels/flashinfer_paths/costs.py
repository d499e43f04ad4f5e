"""Which backend of FlashInfer a batch gets: the one whose work is predicted to take less."""

from typing import Protocol

from stemserve.kernels.layout import AttentionLayout, HeadShape, Int32
from stemserve.kernels.pricing.engine_cost import Cost, TileEngine
from stemserve.kernels.strategy import Kernel, Phase, Work

FA2_TILES = (16, 64, 128)  # rows x heads of a group
GATHER = "gather"
MERGE = "merge"


class StrategyCosts(Protocol):
    def strategy_cost(
        self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
    ) -> Cost: ...


def fa2_tile(
    rows: Int32,  # [requests]
    group: int,  # query heads of a KV head
    head_dim: int,
) -> int:  # rows x heads of a group
    """The tile that fa2 takes for all requests of a batch, by their mean length."""
    mean = int(rows.sum()) * group // max(len(rows), 1)
    if mean > 64 and head_dim < 256:
        return 128
    return 64 if mean > 16 else 16


def fa2_engine(rows: Int32, group: int, head_dim: int) -> str:
    """The name in cost tables of what fa2 takes: see `fa2_tile`."""
    tile = fa2_tile(rows, group, head_dim)
    return "fa2" if tile == 128 else f"fa2_{tile}"


class TileCosts:
    """Where no table was measured: tiles of the two backends as they run on an H200.

    A tile of fa3 is 128 rows of one query head, one a multiprocessor; fa2 has two of them there,
    each of rows x heads of a group, and divides their tokens where it would leave some idle. An
    8196-token causal prefill of 16 heads over 8 takes fa3 0.63 ms and fa2 0.99 ms.
    """

    def __init__(self, shape: HeadShape, multiprocessors: int) -> None:
        ratio = shape.head_dim / 128
        self._engines = {
            "fa3": TileEngine(
                host_seconds=20e-6,
                launch_seconds=8e-6,
                tile_rows=128,
                lanes=shape.query_heads,
                slots=multiprocessors,
                splits=False,
                tile_tokens=128.0,
                token_seconds=19e-9 * ratio,
            )
        }
        for tile, token_ns in zip(FA2_TILES, (34, 40, 58), strict=True):
            self._engines["fa2" if tile == 128 else f"fa2_{tile}"] = TileEngine(
                host_seconds=20e-6,
                launch_seconds=6e-6,
                tile_rows=max(tile // shape.group, 1),
                lanes=shape.kv_heads,
                slots=2 * multiprocessors,
                splits=True,
                tile_tokens=64.0,
                token_seconds=token_ns * 1e-9 * ratio,
            )

    def strategy_cost(
        self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
    ) -> Cost:
        """Of the attention; what copies and merges cost is the same on both backends."""
        total = Cost(0.0, 0.0)
        for part in work.parts:
            engine = self._engines.get(part.engine.removesuffix("_items").removesuffix("_rows"))
            if engine is not None:
                total += engine.cost(part)
        return total
