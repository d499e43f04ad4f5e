"""Rows of a Generate job's samples beside plain decode rows: those that verify drafts, and those of
tokens that were generated before the job gave its pages up."""

from collections.abc import Sequence
from typing import NamedTuple

from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.samples.drafter import Drafter
from stemserve.service.batching.samples.sample import Draw, Sample, sampler_message
from stemserve.service.batching.samples.sample_pages import Room, SamplePages
from stemserve.service.batching.steps.prefix_forest import StoredChain
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.request import GenerateJob, Int32, SamplerSpec


def job_drafter(job: GenerateJob, spec: SamplerSpec) -> Drafter | None:
    """None where drafts are not asked for, or a draw depends on the tokens before it by more than
    the model's logits: those behind a draft's first token would have to wait for it."""
    if not job.draft_tokens or job.constraint is not None or spec.counts_tokens:
        return None
    return Drafter(job.prompt, max_new_tokens=job.max_new_tokens, most=job.draft_tokens)


class _Place(NamedTuple):
    """Pages of a sample that several rows of a step end in, each at a token of its own."""

    table: Int32
    own_key: bytes = b""


class SampleRows:
    def __init__(self, job: GenerateJob, samples: Sequence[Sample], pages: SamplePages) -> None:
        self._job = job
        self._drafters = [(s, s.drafter) for s in samples if s.drafter is not None]
        self._pages = pages
        self._held: dict[Sample, list[int]] = {}  # drafts that the step verifies
        self.drafted_tokens = 0  # verified
        self.accepted_tokens = 0

    @property
    def draft_tokens(self) -> int:
        """That the drafts of a step may have."""
        return sum(drafter.most for sample, drafter in self._drafters if not sample.has_ended)

    @property
    def expected_tokens(self) -> float:
        """Of such drafts, those that will likely come."""
        return sum(drafter.expected for sample, drafter in self._drafters if not sample.has_ended)

    def find_drafts(self) -> bool:
        """Of the samples that may go on; whether there are any."""
        most = self._job.max_new_tokens
        self._held = {}
        for sample, drafter in self._drafters:
            count = len(sample.tokens)
            if not sample.pending and sample.is_ready(self._job, count):
                draft = drafter.draft()[: most - count - 1]
                if draft:
                    self._held[sample] = draft
        return len(self._held) > 0

    def holds(self, sample: Sample) -> bool:
        """A draft was found: `plan_drafts` adds its rows, and the sample has no decode row."""
        return sample in self._held

    def plan_drafts(self, step: StepBuilder, limit: int) -> tuple[list[Draw], bool]:
        """Rows for the drafts that were found, while the step has fewer than `limit`; False: there
        is no page for one now. A draft is cut where it finds no room, down to none."""
        draws: list[Draw] = []
        for sample, whole in self._held.items():
            free = limit - step.rows.num_rows
            if free < 1:
                break
            draft, branch = whole[: free - 1], self._pages.branch(sample)
            room = self._pages.make_room(branch, sample.stored + 1 + len(draft), step)
            if room is Room.NONE and draft:
                draft = []
                room = self._pages.make_room(branch, sample.stored + 1, step)
            if room is Room.NONE:
                return draws, False
            if room is Room.FOUND:
                draws.append(self._verify(sample, draft, step))
        return draws, True

    def note(self, draw: Draw, ids: Sequence[int]) -> None:
        """The draw has brought these tokens."""
        self.drafted_tokens += len(draw.draft)
        self.accepted_tokens += sum(map(int.__eq__, ids, draw.draft))

    def plan_lost(self, sample: Sample, step: StepBuilder) -> tuple[Draw | None, bool]:
        """Run some rows again of tokens that it has generated; the last draws. False: no pages for
        them now."""
        branch = self._pages.branch(sample)
        tokens = sample.sequence(self._job.prompt)
        stop = min(len(tokens), sample.stored + step.room)
        room = self._pages.make_room(branch, stop, step)
        if room is not Room.FOUND:
            return None, room is Room.LATER
        count = stop - sample.stored
        row = self._add(sample, tokens[sample.stored : stop], step)
        if stop < len(tokens):
            return None, True
        return self.draw(sample, row + count - 1, step, 1), True

    def draw(
        self, sample: Sample, row: int, step: StepBuilder, steps: int, node: PageNode | None = None
    ) -> Draw:
        if not sample.is_announced:
            step.readouts.add_sampler(sampler_message(sample, self._job))
            sample.is_announced = True
        at = step.readouts.add_sample(row, sample.slot, len(sample.tokens) + sample.pending)
        if sample.guide is not None:
            step.readouts.add_mask(sample.slot, sample.guide.mask)
        sample.pending += steps
        return Draw(sample, at, steps, node)

    def _verify(self, sample: Sample, draft: Sequence[int], step: StepBuilder) -> Draw:
        """The last token and the draft behind it, a decode row each; a row sees those before it
        in the sample's own pages, and is drawn from as if it were alone."""
        branch, rows, kernel = self._pages.branch(sample), step.rows, self._job.kernel
        place = _Place(branch.table)
        draws: list[Draw] = []
        for token in (sample.tokens[-1], *draft):
            row = rows.add_decode(token, sample.stored, sample.stored + 1, place, kernel)
            draws.append(self.draw(sample, row, step, 1))
            sample.stored += 1
        step.draft_tokens += len(draft)
        sample.is_verifying = True
        return draws[0]._replace(steps=len(draws), draft=draft)

    def _add(self, sample: Sample, tokens: Int32, step: StepBuilder) -> int:
        """The sample's next rows, for which it has pages; returns the first."""
        branch, start = self._pages.branch(sample), sample.stored
        sample.stored = start + len(tokens)
        slots = branch.slots(start, sample.stored)
        chain = StoredChain(branch.table, sample.stored, branch.own_key)
        return step.rows.add_prefill(tokens, slots, chain, self._job.kernel)
