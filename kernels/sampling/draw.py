"""Tokens drawn from logits on a CUDA device, as the tables of the slots say: five launches.

A token is the inverse of the cumulated distribution, in the order of ids, at a number that depends
on the slot's seed and the token's index only. All sums have a fixed order of their own in each row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stemserve.kernels.fused.norm import power_of_2
from stemserve.kernels.sampling import draw_triton, wide_draw_triton
from stemserve.kernels.sampling.slot_tables import GREEDY_TEMPERATURE, DrawnTokens, SlotTables

KERNELS: Any = draw_triton  # untyped: device code
WIDE_KERNELS: Any = wide_draw_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawShape:
    """How a row is divided. All numbers are powers of two."""

    width: int = 128  # tokens of a block
    blocks: int = 32  # of a program that summarises them
    picks: int = 128  # blocks that one program holds
    scan: int = 8192  # tokens of a program that looks at all
    room: int = 1024  # for candidates of such a program
    candidates: int = 8192  # of a row
    warps: int = 16


FASTEST = DrawShape()
STATE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What the launches of a draw share."""

    logits: Tensor
    slots: Tensor
    index: Tensor
    tables: SlotTables
    shape: DrawShape
    drawn: DrawnTokens
    # [rows, blocks] float32 each: largest logits, sums, sums at the temperature
    parts: tuple[Tensor, Tensor, Tensor]
    wide: Tensor  # [rows] int32: how a row is still to be drawn
    state: Tensor  # [rows, STATE] int32
    arrived: Tensor  # [rows] int32: programs of a row that are done

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.logits.stride(0), self.logits.shape[1], self.blocks

    @property
    def rows(self) -> int:
        return self.logits.shape[0]

    @property
    def blocks(self) -> int:
        return self.parts[0].shape[1]

    @property
    def table(self) -> Tensor:
        return self.tables.params

    @property
    def pad(self) -> int:
        return power_of_2(self.blocks)


def draw_tokens(
    logits: Tensor,  # [n, vocab] float32; rows may be strided
    tables: SlotTables,
    slots: Tensor,  # [n] int64
    index: Tensor,  # [n] int64: tokens that the slot's request generated before
    shape: DrawShape = FASTEST,
) -> DrawnTokens:
    """Also keeps the tokens as the slots' last ones. No launch depends on what the tensors hold."""
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError("logits must be float32, those of a row side by side")
    blocks = -(-vocab // shape.width)
    new = logits.new_empty
    # None is a part of another: it would start anywhere, and kernels be compiled for that.
    work = _Work(
        logits=logits,
        slots=slots,
        index=index,
        tables=tables,
        shape=shape,
        drawn=DrawnTokens(new(rows, dtype=torch.int64), new(rows), new(rows, dtype=torch.bool)),
        parts=(new((rows, blocks)), new((rows, blocks)), new((rows, blocks))),
        wide=new(rows, dtype=torch.int32),
        arrived=new(rows, dtype=torch.int32),
        state=new((rows, STATE), dtype=torch.int32),
    )
    if rows:
        _draw_few(work)
        _draw_wide(work)
    return work.drawn


def _draw_few(work: _Work) -> None:
    """Rows whose allowed tokens are few, and those that allow every token."""
    shape, rows = work.shape, work.rows
    KERNELS.block_kernel[(-(-work.blocks // shape.blocks), rows)](
        work.logits,
        work.slots,
        work.table,
        *work.parts,
        *work.sizes,
        GREEDY=GREEDY_TEMPERATURE,
        BLOCKS=shape.blocks,
        WIDTH=shape.width,
        num_warps=4,
    )
    KERNELS.row_kernel[(rows,)](
        work.logits,
        work.slots,
        work.index,
        work.table,
        work.tables.last_token,
        *work.parts,
        work.logits.new_empty((rows, shape.picks), dtype=torch.int32),
        work.wide,
        work.state,
        work.arrived,
        *work.drawn,
        *work.sizes,
        GREEDY=GREEDY_TEMPERATURE,
        PAD=work.pad,
        PICKS=shape.picks,
        WIDTH=shape.width,
        MOST=shape.candidates // 2,
        num_warps=shape.warps,
    )


def _draw_wide(work: _Work) -> None:
    """The other rows; programs of rows that are done end at once."""
    shape, rows = work.shape, work.rows
    programs = -(-work.logits.shape[1] // shape.scan)
    tiles = power_of_2(programs)
    room = max(shape.room, shape.candidates // tiles)
    new = work.logits.new_empty
    partial = new((rows, 4, tiles), dtype=torch.float64)
    listed = new((2, rows, tiles, room), dtype=torch.int32)
    WIDE_KERNELS.scan_kernel[(programs, rows)](
        work.logits,
        work.slots,
        work.table,
        work.parts[0],
        work.wide,
        work.state,
        partial,
        *listed,
        *work.sizes,
        PAD=work.pad,
        SCAN=shape.scan,
        TILES=tiles,
        ROOM=room,
        num_warps=shape.warps,
    )
    WIDE_KERNELS.settle_kernel[(rows,)](
        work.logits,
        work.slots,
        work.table,
        *work.parts,
        work.wide,
        work.state,
        partial,
        *listed,
        new((rows, tiles), dtype=torch.int32),
        *work.sizes,
        programs,
        PAD=work.pad,
        WIDTH=shape.width,
        TILES=tiles,
        ROOM=room,
        TILE=shape.candidates,
        num_warps=shape.warps,
    )
    WIDE_KERNELS.weigh_kernel[(programs, rows)](
        work.logits,
        work.slots,
        work.index,
        work.table,
        work.tables.last_token,
        *work.parts[:2],
        work.wide,
        work.state,
        work.arrived,
        new((rows, tiles), dtype=torch.float64),
        *work.drawn,
        *work.sizes,
        PAD=work.pad,
        WIDTH=shape.width,
        SCAN=shape.scan,
        TILES=tiles,
        num_warps=shape.warps,
    )
