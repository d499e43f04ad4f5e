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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """What the launches for the other rows share."""

    programs: int  # of a row
    tiles: int  # as many, as a power of two
    room: int  # for candidates of a tile
    partial: Tensor  # [rows, 4, tiles] float64
    listed: Tensor  # [2, rows, tiles, room] int32


def _draw_wide(work: _Work) -> None:
    """The other rows; programs of rows that are done end at once."""
    programs = -(-work.logits.shape[1] // work.shape.scan)
    tiles = power_of_2(programs)
    room = max(work.shape.room, work.shape.candidates // tiles)
    new = work.logits.new_empty
    shared = _Tiles(
        programs=programs,
        tiles=tiles,
        room=room,
        partial=new((work.rows, 4, tiles), dtype=torch.float64),
        listed=new((2, work.rows, tiles, room), dtype=torch.int32),
    )
    _scan(work, shared)
    _settle(work, shared)
    _weigh(work, shared)


def _scan(work: _Work, shared: _Tiles) -> None:
    """What of each tile lies above and between the bounds of `state`, and its tokens there."""
    WIDE_KERNELS.scan_kernel[(shared.programs, work.rows)](
        work.logits,
        work.slots,
        work.table,
        work.parts[0],
        work.wide,
        work.state,
        shared.partial,
        *shared.listed,
        *work.sizes,
        PAD=work.pad,
        SCAN=work.shape.scan,
        TILES=shared.tiles,
        ROOM=shared.room,
        num_warps=work.shape.warps,
    )


def _settle(work: _Work, shared: _Tiles) -> None:
    """From which logit on tokens of a row may come, and up to which id at it: into `state`."""
    WIDE_KERNELS.settle_kernel[(work.rows,)](
        work.logits,
        work.slots,
        work.table,
        *work.parts,
        work.wide,
        work.state,
        shared.partial,
        *shared.listed,
        work.logits.new_empty((work.rows, shared.tiles), dtype=torch.int32),
        *work.sizes,
        shared.programs,
        PAD=work.pad,
        WIDTH=work.shape.width,
        TILES=shared.tiles,
        ROOM=shared.room,
        TILE=work.shape.candidates,
        num_warps=work.shape.warps,
    )


def _weigh(work: _Work, shared: _Tiles) -> None:
    """What may come of each tile; the last program of a row draws from the sums."""
    WIDE_KERNELS.weigh_kernel[(shared.programs, work.rows)](
        work.logits,
        work.slots,
        work.index,
        work.table,
        work.tables.last_token,
        *work.parts[:2],
        work.wide,
        work.state,
        work.arrived,
        work.logits.new_empty((work.rows, shared.tiles), dtype=torch.float64),
        *work.drawn,
        *work.sizes,
        PAD=work.pad,
        WIDTH=work.shape.width,
        SCAN=work.shape.scan,
        TILES=shared.tiles,
        num_warps=work.shape.warps,
    )
