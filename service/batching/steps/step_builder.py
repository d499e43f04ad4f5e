"""Collect one step, and remember whose it is and which pages it computes."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.pages.sequence import Branch, Chain
from stemserve.service.batching.steps.plan_arrays import pack_int32
from stemserve.service.batching.steps.prefix_forest import ForestMemory, StoredChain
from stemserve.service.batching.steps.step_readouts import StepReadouts
from stemserve.service.batching.steps.step_rows import StepRows
from stemserve.service.request import Int32


class Share:
    """What one job has in a step. Most have decode rows only, and nothing else is made for them."""

    __slots__ = ("_sources", "_written", "decode_rows", "prefill_rows")

    def __init__(self) -> None:
        self.prefill_rows = 0  # of PREFILL and ITEM segments
        self.decode_rows = 0
        self._written: dict[PageNode, int] | None = None
        self._sources: set[PageNode] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.prefill_rows or self.decode_rows or self._written)

    @property
    def written(self) -> Mapping[PageNode, int]:
        """How much of each page that the job computes was planned before."""
        return self._written or {}

    @property
    def sources(self) -> Set[PageNode]:
        """Pages that it copies from."""
        return self._sources or set()

    def note_written(self, before: dict[PageNode, int]) -> None:
        """To be called before more of the pages is planned."""
        self._written = before if self._written is None else before | self._written

    def note_source(self, node: PageNode) -> None:
        if self._sources is None:
            self._sources = set()
        self._sources.add(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedStep:
    """A step whose result has not come."""

    step_id: int
    shares: dict[int, Share]  # by the job's arrival number, in plan order
    num_rows: int  # of one sub-step
    decode_rows: int
    draft_tokens: int  # that it verifies
    repeat: int  # sub-steps
    gather_rows: Int32
    num_gather_ids: int
    classify_rows: Int32
    sample_rows: Int32  # [repeat * samples] counted through all sub-steps
    span_starts: Int32  # [spans] first row of each run of rows of one job, ascending
    span_jobs: Int32  # [spans] its arrival number

    def jobs_of(self, rows: Int32) -> set[int]:
        """Arrival numbers of those whose rows they are."""
        spans = np.searchsorted(self.span_starts, rows, side="right") - 1
        return set(self.span_jobs[spans].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens start .. stop - 1 of a chain, as rows of a step; there may be none."""

    start: int
    stop: int
    last_row: int  # -1: no rows


class StepBuilder:
    """Jobs add to `rows` and `readouts` one after another, in plan order (`begin`, `end`)."""

    def __init__(
        self,
        step_id: int,
        *,
        page_size: int,
        max_rows: int,
        most_rows: int = 0,
        forests: ForestMemory | None = None,
    ) -> None:
        """`most_rows`: where that is more than max_rows, a unit that cannot be divided may have it.
        `forests` remembers the forests of the steps before.
        """
        self.step_id = step_id
        self.page_size = page_size
        self.rows = StepRows(page_size, forests or ForestMemory(page_size))
        self.readouts = StepReadouts()
        self.pages_blocked = False  # a job ahead waits for pages: nobody behind it takes any
        self.slots_blocked = False  # the same of sampler slots
        self.reserved = 0  # rows that are kept free for short jobs
        self.max_steps = 1  # of a decode row; more than 1: it is a burst
        self.verifies = False  # drafts, where samples have some
        self.draft_tokens = 0
        self.max_rows = max_rows
        self._most_rows = max(max_rows, most_rows)
        self._spans: list[tuple[int, int]] = []  # first row and job
        self._share = Share()
        self._shares: dict[int, Share] = {}
        self._before: dict[PageNode, int] = {}  # planned tokens before this step
        self._held: list[PageNode] = []
        self._copies: list[tuple[int, int, int]] = []

    @property
    def room(self) -> int:
        room = self.max_rows - self.rows.num_rows - self.reserved
        return room if room > 0 else 0

    @property
    def room_for_one(self) -> int:
        """Rows that one unit may have, if it cannot be divided: it comes before all others."""
        if self.rows.num_rows > self.rows.num_decodes:
            return self.room
        return max(self.room, self._most_rows - self.rows.num_rows)

    def begin(self, arrival: int) -> Share:
        """What is added next belongs to this job."""
        share = self._shares.get(arrival)
        if share is None:
            share = self._shares[arrival] = Share()
        self._share = share
        self._spans.append((self.rows.num_rows, arrival))
        return share

    def hold(self, node: PageNode) -> None:
        """Take over the caller's reference to the node, until the step is built."""
        self._held.append(node)

    def planned_before(self, node: PageNode) -> int:
        """How many of the page's tokens earlier steps compute."""
        return self._before.get(node, node.planned)

    def add_copy(self, source: PageNode, page: int, tokens: int) -> None:
        """Begin `page` with the first tokens of another, which earlier steps compute."""
        self._copies.append((source.page, page, tokens))
        self._share.note_source(source)

    def copy_pages(self, sources: Sequence[int], pages: Sequence[int], tokens: int) -> None:
        """Begin each page with the first tokens of another page of the same job's own."""
        self._copies += zip(sources, pages, repeat(tokens))

    def copy_tail(self, branch: Branch) -> None:
        """Begin the branch's first own page with its chain's partial tail."""
        if branch.tail is not None:
            page = int(branch.table[branch.chain_pages])
            self.add_copy(branch.tail, page, branch.tail_tokens)

    def mark(self, node: PageNode, planned: int) -> None:
        """The step computes, or copies, the page's tokens up to `planned`."""
        self._before.setdefault(node, node.planned)
        self._share.note_written({node: node.planned})
        node.planned = max(node.planned, planned)

    def mark_chain(self, chain: Chain, start: int, stop: int) -> None:
        size = self.page_size
        last = (stop - 1) // size
        filled = chain.nodes[start // size : last]
        before = {node: node.planned for node in filled}
        self._before = before | self._before
        self._share.note_written(before)
        for node in filled:
            node.planned = size
        self.mark(chain.nodes[last], stop - last * size)

    def prefill(self, chain: Chain, kernel: int, *, reads_from: int) -> Chunk:
        """Compute what no issued step computes of the chain, as far as there is room.

        The rows of tokens from `reads_from` on are read: keys and values of some may be stored,
        their logits are not, so that they run again.
        """
        planned = chain.planned_tokens()
        start = min(planned, reads_from)
        stop = min(chain.length, start + self.room)
        if start >= stop:
            return Chunk(start=start, stop=stop, last_row=-1)
        slots = chain.slots(start, stop)
        slots[: planned - start] = -1
        stored = StoredChain(chain.table, stop)
        first_row = self.rows.add_prefill(chain.tokens[start:stop], slots, stored, kernel)
        if planned < stop:
            self.mark_chain(chain, planned, stop)
        return Chunk(start=start, stop=stop, last_row=first_row + stop - start - 1)

    def finish(
        self, release: Callable[[Sequence[PageNode]], None]
    ) -> tuple[worker_pb2.StepPlan, IssuedStep] | None:
        """None if the step has no rows; then it computes and copies nothing."""
        if self.rows.num_rows == 0:
            for node, before in self._before.items():
                node.planned = before
            release(self._held)
            return None
        release(self._held)
        plan = worker_pb2.StepPlan(step_id=self.step_id)
        self.rows.write(plan)
        self.readouts.write(plan)
        if self._copies:
            plan.copies = pack_int32([number for copy in self._copies for number in copy])
        issued = IssuedStep(
            step_id=self.step_id,
            shares={n: share for n, share in self._shares.items() if not share.is_empty},
            num_rows=self.rows.num_rows,
            decode_rows=sum(share.decode_rows for share in self._shares.values()),
            draft_tokens=self.draft_tokens,
            repeat=self.rows.repeat,
            gather_rows=self.readouts.gather_rows,
            num_gather_ids=self.readouts.num_gather_ids,
            classify_rows=self.readouts.classify_rows,
            sample_rows=self._sample_rows(),
            span_starts=np.array([first for first, _ in self._spans], np.int32),
            span_jobs=np.array([arrival for _, arrival in self._spans], np.int32),
        )
        return plan, issued

    def _sample_rows(self) -> Int32:
        rows, repeat = self.readouts.sample_rows, self.rows.repeat
        if repeat == 1:
            return rows
        starts = np.arange(repeat, dtype=np.int32) * self.rows.num_rows
        return (starts[:, None] + rows).ravel()
