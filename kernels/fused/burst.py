"""Rows of decode steps that follow each other without the host, on a CUDA device.

All that the steps need is in one int32 buffer, `BurstShape`:

* a header: the number of the next step, that of growth entries, and that of the last step;
* for each of token ids (-1 - slot: the token last sampled into the slot), positions, slots of keys
  and values, and sample indexes: [steps, rows];
* the sampler slots [rows];
* growth entries: places in the tables, then values [steps, entries];
* the tables of the attention's plan, to its end.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stemserve.kernels.fused import burst_triton

KERNELS: Any = burst_triton  # untyped: device code
HEADER = 16
RESULTS = 3  # numbers of a row: token, bits of its log-probability, 1 where this is not finite
FIELDS = 4  # arrays of numbers that differ from step to step
BLOCK = 256
ALIGNMENT = 64  # entries, of the tables


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstShape:
    rows: int
    steps: int  # at most
    growth: int  # entries at most

    @property
    def slots_at(self) -> int:
        return HEADER + FIELDS * self.steps * self.rows

    @property
    def places_at(self) -> int:
        return self.slots_at + self.rows

    @property
    def values_at(self) -> int:
        return self.places_at + self.growth

    @property
    def tables_at(self) -> int:
        end = self.values_at + self.steps * self.growth
        return -(-end // ALIGNMENT) * ALIGNMENT


class BurstRows(NamedTuple):
    """What one step reads; never moved, so that captured graphs may read it."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int32
    kv_slots: Tensor  # [rows] int32
    sample_slots: Tensor  # [rows] int64
    sample_index: Tensor  # [rows] int64

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "BurstRows":
        kinds = (torch.int64, torch.int32, torch.int32, torch.int64, torch.int64)
        return cls(*(torch.zeros(rows, dtype=kind, device=device) for kind in kinds))

    def first(self, rows: int) -> "BurstRows":
        return BurstRows(*(part[:rows] for part in self))


class StepDraws(NamedTuple):
    tokens: Tensor  # [rows] int64
    logprobs: Tensor  # [rows] float32


def advance(
    inputs: Tensor,  # int32, `shape`
    shape: BurstShape,
    last_token: Tensor,  # [slots] int64
    rows: BurstRows,  # of the shape's rows; written
) -> None:
    """The next step: its rows, and the entries of the tables that it changes."""
    KERNELS.advance_kernel[(1,)](
        inputs,
        last_token,
        *rows,
        shape.rows,
        shape.steps,
        shape.places_at,
        shape.values_at,
        shape.tables_at,
        HEADER=HEADER,
        BLOCK=BLOCK,
        num_warps=4,
    )


def record(
    inputs: Tensor,  # int32
    draws: StepDraws,
    sample_slots: Tensor,  # [rows] int64, no two the same but a spare one
    last_token: Tensor,  # [slots] int64, written
    results: Tensor,  # [steps, RESULTS, rows] int32, written
    vocab: int,
) -> None:
    """What the step drew, into the slots and into the results."""
    KERNELS.record_kernel[(1,)](
        inputs,
        *draws,
        sample_slots,
        last_token,
        results,
        len(draws.tokens),
        vocab,
        BLOCK=BLOCK,
        num_warps=4,
    )
