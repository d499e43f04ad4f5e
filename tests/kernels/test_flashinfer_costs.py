"""The choice of a backend where no table was measured."""

import numpy as np
import pytest
from tests.kernels.forests import head_shape, items_over

from stemserve.kernels.flashinfer_paths.costs import TileCosts, fa2_engine
from stemserve.kernels.layout import int32
from stemserve.kernels.strategy import Kernel, Part, Phase, Work

SHAPE = head_shape(16, 8, 128)


def seconds(engine: str, rows: list[int], tokens: list[int]) -> float:
    part = Part(engine=engine, rows=int32(rows), kv_tokens=int32(tokens), causal=True)
    layout, work = items_over(16, [1]), Work(parts=(part,))
    return TileCosts(SHAPE, 132).strategy_cost(Phase.PREFILL, Kernel.RAGGED, layout, work).seconds


def test_tiles_follow_the_mean_length_of_a_batch() -> None:
    assert fa2_engine(int32([1] * 8), SHAPE.group, 128) == "fa2_16"
    assert fa2_engine(int32([1] * 8 + [200]), SHAPE.group, 128) == "fa2_64"
    assert fa2_engine(int32([300, 2]), SHAPE.group, 128) == "fa2"
    assert fa2_engine(int32([300, 2]), SHAPE.group, 256) == "fa2_64"
    assert fa2_engine(int32([]), SHAPE.group, 128) == "fa2_16"


@pytest.mark.parametrize(
    ("rows", "tokens", "fa3_is_faster"),
    [
        ([8196], [8196], True),
        ([8196] + [4] * 32, [8196] + [8200] * 32, True),
        ([256] * 32, [8452] * 32, True),
        ([4] * 32, [8200] * 32, False),
        ([1] * 64, [1024] * 64, False),
        ([4] * 2, [8200] * 2, False),
    ],
)
def test_the_faster_backend_is_known_without_a_table(
    rows: list[int], tokens: list[int], fa3_is_faster: bool
) -> None:
    fa2 = seconds(fa2_engine(int32(rows), SHAPE.group, SHAPE.head_dim), rows, tokens)
    assert (seconds("fa3", rows, tokens) < fa2) == fa3_is_faster


def test_copies_and_unknown_engines_do_not_count() -> None:
    assert seconds("gather", [0], [5000]) == 0.0
    assert np.isclose(seconds("fa3_items", [128], [900]), seconds("fa3", [128], [900]))
