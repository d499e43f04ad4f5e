"""The pages in which the samples of a Generate job go on behind its prompt."""

from collections.abc import Sequence
from enum import Enum, auto

from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.sampler_slots import SamplerSlots
from stemserve.service.batching.pages.sequence import Branch, Chain, pages_for
from stemserve.service.batching.samples.sample import Sample
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.request import GenerateJob


class Room(Enum):
    FOUND = auto()
    LATER = auto()  # in the next step: the first page is a copy that has to wait
    NONE = auto()  # until others let go of pages


def generate_pages(job: GenerateJob, page_size: int) -> int:
    """The most pages that the job needs: the last token's KV is never stored."""
    prompt_pages = pages_for(len(job.prompt), page_size)
    if job.max_new_tokens == 1:
        return prompt_pages
    shared = len(job.prompt) // page_size
    whole = pages_for(len(job.prompt) + job.max_new_tokens - 1, page_size)
    return max(prompt_pages, shared + len(job.samplers) * (whole - shared))


class SamplePages:
    def __init__(self, job: GenerateJob, samples: Sequence[Sample], cache: KvCache) -> None:
        self.chain: Chain | None = None  # the prompt; None: it holds no pages
        self._job = job
        self._samples = samples
        self._cache = cache
        self._capacity = len(job.prompt) + job.max_new_tokens - 1

    def start(self, step: StepBuilder, slots: SamplerSlots) -> Chain | None:
        """Hold pages for the prompt, and slots; leaves room for the samples' first pages. None:
        there are none now."""
        live = [sample for sample in self._samples if not sample.has_ended]
        if step.slots_blocked or slots.num_free < len(live):
            step.slots_blocked = True
            return None
        job, cache = self._job, self._cache
        prompt = len(job.prompt)
        needed = cache.missing_pages(job.prompt, job.realm) + step.rows.num_decodes
        for sample in live:
            length = min(prompt + len(sample.tokens) + 1, self._capacity)
            needed += pages_for(length, cache.page_size) - prompt // cache.page_size
        others_hold_pages = cache.available_pages < cache.allocator.num_pages
        if step.pages_blocked or (needed > cache.available_pages and others_hold_pages):
            step.pages_blocked = True
            return None
        self.chain = cache.acquire(job.prompt, job.realm, step, own_tail=True)
        if self.chain is None:
            step.pages_blocked = True
            return None
        for sample, slot in zip(live, slots.take(len(live)), strict=True):
            sample.slot = slot
        return self.chain

    def branch(self, sample: Sample) -> Branch:
        if sample.branch is None:
            size = self._cache.page_size
            sample.branch = Branch(self.chain, capacity=self._capacity, page_size=size)
        return sample.branch

    def make_room(self, branch: Branch, tokens: int, step: StepBuilder) -> Room:
        """Give the branch of a sample pages for that many tokens."""
        missing = branch.missing_pages(tokens)
        if not missing:
            return Room.FOUND
        if branch.has_started:
            if step.pages_blocked:
                return Room.NONE
            pages = self._cache.allocate(missing, after=branch.last_page)
            if pages is None:
                return Room.NONE
            branch.add_pages(pages)
            return Room.FOUND
        return self._begin(branch, tokens, step)

    def _begin(self, branch: Branch, tokens: int, step: StepBuilder) -> Room:
        if not self._cache.can_extend(branch, step):
            return Room.LATER
        if step.pages_blocked or not self._cache.extend(branch, tokens, step):
            return Room.NONE
        self._drop_prompt_tail()
        return Room.FOUND

    def settle(self, sample: Sample) -> None:
        """Leave what a sample that has ended computed in the tree: not all that it has generated,
        where it was stopped while rows of lost pages ran again."""
        if sample.branch is not None and self.chain is not None:
            stored = sample.sequence(self._job.prompt)[:-1][: sample.stored]
            self._cache.adopt(sample.branch, self.chain, stored, self._job.realm)
            sample.branch = None

    def drop(self, sample: Sample) -> None:
        if sample.branch is not None:
            self._cache.drop(sample.branch)
            sample.branch = None

    def release_prompt(self) -> None:
        if self.chain is not None:
            self._cache.tree.release(self.chain.nodes)
        self.chain = None

    def _drop_prompt_tail(self) -> None:
        """Once every sample has its own copy of the prompt's partial page, nobody here reads it."""
        chain = self.chain
        if chain is None or chain.tail is None:
            return
        for sample in self._samples:
            started = sample.branch is not None and sample.branch.has_started
            claims = sample.branch is not None and sample.branch.claimed is not None
            if claims or not (started or sample.has_ended):
                return
        self._cache.tree.release([chain.nodes.pop()])
