"""The buffers that all decode graphs share, and one graph for each number of rows."""

import logging
from collections.abc import Iterator, Sequence

import torch

from stemserve.kernels.codec.decode import CodecDecode
from stemserve.kernels.codec.growth import NO_GROWTH
from stemserve.kernels.fused.burst import RESULTS, BurstRows, BurstShape
from stemserve.kernels.sampling.slot_tables import SlotTables
from stemserve.worker.graphs.capture import Capture
from stemserve.worker.graphs.decode_graph import DecodeGraph, DecodeParts
from stemserve.worker.graphs.padded_burst import InputsShape, PaddedBurst, idle_burst
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.steps.staging import Staging

PAGES_OF_A_PLAN = 1 << 18  # at most: a megabyte of words, and one of masks

log = logging.getLogger(__name__)


class DecodeMemory:
    """Largest sizes of everything; the graphs see the first parts."""

    def __init__(
        self,
        model: Transformer,
        pool: KvPool,
        codec: CodecDecode,
        slots: SlotTables,
        *,
        rows: Sequence[int],  # numbers of rows, ascending
        steps: int,  # of a burst, at most
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._slots = slots
        self._hosts = {count: codec.planner.take(self._idle_burst(count).layout) for count in rows}
        shapes = {count: self._shape(count, steps) for count in rows}
        device, most = pool.device, rows[-1]
        size = max(shape.size for shape in shapes.values())
        self.staging = Staging(size, device)
        self.inputs = torch.zeros(size, dtype=torch.int32, device=device)
        parts = DecodeParts(
            model=model,
            pool=pool,
            codec=codec,
            slots=slots,
            inputs=self.inputs,
            rows=BurstRows.empty(most, device),
            hidden=torch.zeros((most, model.config.hidden_size), dtype=model.dtype, device=device),
            results=torch.zeros(steps * RESULTS * most, dtype=torch.int32, device=device),
            partial=codec.partial(max(s.tables.partial_rows for s in shapes.values())),
        )
        self.graphs = {
            count: DecodeGraph(parts, shapes[count], self._hosts[count]) for count in rows
        }

    @torch.inference_mode()
    def capture(self, capture: Capture) -> Iterator[int]:
        """The largest first: the others fit into its memory. Yields each number of rows."""
        for rows in sorted(self.graphs, reverse=True):
            self.idle(rows)
            try:
                self.graphs[rows].capture(capture)
            except Exception as error:
                del self.graphs[rows]
                log.error("decode steps of %d rows have no graph of their own: %s", rows, error)
            else:
                yield rows

    def idle(self, rows: int) -> None:
        """Inputs of rows that nobody has."""
        burst = self._idle_burst(rows)
        shape = self.graphs[rows].shape
        parts = shape.pack(burst, self._hosts[rows], NO_GROWTH, self.staging.take())
        self.staging.send(self.inputs, parts)

    def _idle_burst(self, rows: int) -> PaddedBurst:
        return idle_burst(
            rows,
            page_size=self._pool.shape.page_size,
            spare_page=self._pool.spare_page,
            spare_slot=self._slots.spare,
        )

    def _shape(self, rows: int, steps: int) -> InputsShape:
        # A page that several tiles read is in the plan several times.
        pages = min(2 * self._pool.shape.pages + 4 * rows, PAGES_OF_A_PLAN)
        tables = self._codec.roomy_capacity(rows, pages)
        per_leaf = 2 * (1 + -(-steps // self._pool.shape.page_size))
        growth = rows * per_leaf + 2 * tables.records * 4
        return InputsShape(
            burst=BurstShape(rows=rows, steps=steps, growth=growth if steps > 1 else 0),
            tables=tables,
            record=self._hosts[rows].records.shape[1],
        )
