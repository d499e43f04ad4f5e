"""Log-probabilities of a prompt's own tokens, read from the rows before them."""

from typing import NamedTuple

import numpy as np

from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.pages.sequence import Chain
from stemserve.service.batching.steps.step_builder import Chunk, StepBuilder
from stemserve.service.batching.steps.step_outputs import StepOutputs
from stemserve.service.request import Float32, Int32


class _Read(NamedTuple):
    """Values of a step in flight."""

    start: int  # token whose row is the first that is read
    rows: int
    gather_at: int
    id_at: int
    nodes: list[PageNode]  # pages of the rows, from that of the first
    page_size: int


class PromptReads:
    """Rows are read in order, each once: what the cache holds of them are keys and values only."""

    def __init__(self, prompt: Int32) -> None:
        self._prompt = prompt
        self._num_planned = 0  # leading rows that issued steps read
        self._in_flight: dict[int, _Read] = {}  # by step
        self.logprobs: Float32 = np.full(len(prompt) - 1, np.nan, np.float32)

    @property
    def next_row(self) -> int:
        """Of the prompt's last token: all are read."""
        return self._num_planned

    def plan(self, step: StepBuilder, chunk: Chunk, chain: Chain) -> None:
        """Read what is in the chunk and was not read before."""
        start, stop = max(chunk.start, self._num_planned), min(chunk.stop, len(self.logprobs))
        if start >= stop:
            return
        readouts, count = step.readouts, stop - start
        size, at = chain.page_size, (readouts.num_gathers, readouts.num_gather_ids)
        nodes = chain.nodes[start // size : (stop - 1) // size + 1]
        self._in_flight[step.step_id] = _Read(start, count, *at, nodes, size)
        first_row = chunk.last_row - (chunk.stop - 1 - start)
        rows = np.arange(first_row, first_row + count, dtype=np.int32)
        readouts.add_gathers(rows, np.ones(count, np.int32), self._prompt[start + 1 : stop + 1])
        self._num_planned = stop

    def deliver(self, outputs: StepOutputs) -> PageNode | None:
        """The page of the first row whose logits were not finite; None: there is none."""
        read = self._in_flight.pop(outputs.step_id, None)
        if read is None:
            return None
        values = outputs.gather_logprobs[read.id_at : read.id_at + read.rows]
        self.logprobs[read.start : read.start + read.rows] = values
        failed = np.flatnonzero(outputs.gather_failed[read.gather_at :][: read.rows])
        if not len(failed):
            return None
        page = (read.start + int(failed[0])) // read.page_size - read.start // read.page_size
        return read.nodes[page]
