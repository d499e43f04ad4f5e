"""A whole decode step as work for one number of rows: captured once, replayed for every step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from torch import Tensor

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec.decode import CodecDecode, DecodePlan
from stemserve.kernels.codec.growth import Growth
from stemserve.kernels.codec.host_tables import HostTables
from stemserve.kernels.codec.tiles import TILE_ROWS
from stemserve.kernels.fused.burst import RESULTS, BurstRows, StepDraws, advance, record
from stemserve.kernels.sampling.draw import draw_tokens
from stemserve.kernels.sampling.slot_tables import SlotTables
from stemserve.worker.graphs.capture import Capture
from stemserve.worker.graphs.fastest_way import capture_fastest
from stemserve.worker.graphs.padded_burst import InputsShape
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.steps.kv_writes import KvWrites

log = logging.getLogger(__name__)


class Ending(StrEnum):
    """What follows the final norm."""

    LIKELIEST = "likeliest"  # of each row
    DRAWN = "drawn"  # as each row's slot says


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts:
    """What the graphs of all numbers of rows have in common; nothing here ever moves."""

    model: Transformer
    pool: KvPool
    codec: CodecDecode
    slots: SlotTables
    inputs: Tensor  # int32, of the largest InputsShape
    rows: BurstRows  # of the most rows
    hidden: Tensor  # [most rows, hidden] after the final norm
    results: Tensor  # int32 [steps * RESULTS * rows] of the most
    partial: AttentionState  # of the most partial rows


class DecodeGraph:
    def __init__(self, parts: DecodeParts, shape: InputsShape, host: HostTables) -> None:
        """`host`: the plan of any layout."""
        burst = shape.burst
        self.shape = shape
        self.results = parts.results[: burst.steps * RESULTS * burst.rows].view(
            burst.steps, RESULTS, burst.rows
        )
        self.hidden = parts.hidden[: burst.rows]
        self._parts = parts
        self._rows = parts.rows.first(burst.rows)
        self._tables = parts.inputs[burst.tables_at : shape.size]
        self._host = host
        self._advance: dict[bool, Callable[[], None]] = {}
        self.end: dict[Ending, Callable[[], None]] = {}

    def capture(self, capture: Capture) -> None:
        """Afterwards `advance` and one of `end` are a decode step."""
        codec, ops = self._parts.codec, self._parts.model.ops
        # Fewer rows than a tile has are as fast by the other kernel, which reads paired bins too.
        rows = self.shape.burst.rows
        wide = rows * codec.shape.group > TILE_ROWS
        for paired in (False, True) if wide and codec.hopper is not None else (False,):
            work = partial(self._to_hidden, self._plan(paired=paired))
            self._advance[paired] = capture_fastest(ops, rows, capture, work)
        self.end[Ending.LIKELIEST] = capture(self._take_likeliest)
        try:
            self.end[Ending.DRAWN] = capture(self._draw)
        except Exception as error:
            log.error("draws of %d rows have no graph: %s", rows, error)

    def advance(self, *, paired: bool) -> None:
        """To the final norm, with tables whose bins are paired, or not."""
        self._advance[paired and paired in self._advance]()

    def misfit(self, host: HostTables, growth: Growth) -> str | None:
        """Why the graph cannot run the plan; None: it can."""
        return self.shape.misfit(host, growth)

    def _plan(self, *, paired: bool) -> DecodePlan:
        parts = self._parts
        return parts.codec.plan_at(
            self._tables, self.shape.tables, parts.partial, self._host, paired=paired
        )

    def _to_hidden(self, plan: DecodePlan) -> None:
        parts, rows = self._parts, self._rows
        advance(parts.inputs, self.shape.burst, parts.slots.last_token, rows)
        pages = KvWrites(parts.pool, rows.kv_slots)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = LayerKV(parts.pool.k_pages(layer), parts.pool.v_pages(layer), k, v)
            return parts.codec.run(plan, q, kv).out

        hidden = parts.model.hidden(rows.token_ids, rows.positions, attend, None, pages)
        self.hidden.copy_(hidden)

    def _take_likeliest(self) -> None:
        self._record(StepDraws(*self._parts.model.likeliest(self.hidden)))

    def _draw(self) -> None:
        parts, rows = self._parts, self._rows
        logits = parts.model.logits(self.hidden)
        drawn = draw_tokens(logits, parts.slots, rows.sample_slots, rows.sample_index)
        self._record(StepDraws(drawn.tokens, drawn.logprobs))

    def _record(self, draws: StepDraws) -> None:
        parts = self._parts
        record(
            parts.inputs,
            draws,
            self._rows.sample_slots,
            parts.slots.last_token,
            self.results,
            parts.model.config.vocab_size,
        )
