"""Operations in calls of one number of rows, whatever the number of rows of a step.

Libraries pick a way to add up by the number of rows. In calls of one size a row's bits depend on
its own numbers only, as long as its place in a block does not matter, which `check_places` tries.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stemserve.worker.models.errors import ModelError
from stemserve.worker.models.linear import Linear

ROWS = 16  # of a block; on a CPU more rows at once are not faster


def by_blocks(operation: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The operation of inputs of the same rows, zeros behind the last of them."""
    count = len(inputs[0])
    starts = range(0, max(1, count), ROWS)
    parts = [operation(*(_block(rows, start) for rows in inputs)) for start in starts]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]


def _block(rows: Tensor, start: int) -> Tensor:  # [ROWS, ...] contiguous
    block = rows[start : start + ROWS]
    if len(block) == ROWS:
        return block.contiguous()
    padded = rows.new_zeros((ROWS, *rows.shape[1:]))
    padded[: len(block)] = block
    return padded


class BlockLinear:
    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return by_blocks(self._linear, x)


def check_places(linear: Linear, weight: Tensor) -> None:
    """Raises ModelError if a row has other bits at another place of a block, or among others."""
    generator = torch.Generator(weight.device).manual_seed(ROWS)
    x = torch.randn((ROWS, weight.shape[1]), generator=generator, device=weight.device)
    x = x.to(weight.dtype)
    expected = linear(x)
    moved = x.roll(5, 0)
    alone = torch.zeros_like(x)
    alone[3] = x[0]
    if torch.equal(linear(moved).roll(-5, 0), expected) and torch.equal(
        linear(alone)[3], expected[0]
    ):
        return
    raise ModelError(
        f"the matrix library of this {weight.device.type} rounds a row by its place among others "
        f"(weights {tuple(weight.shape)}, {weight.dtype}): no deterministic results here"
    )
