"""Sequences below a random forest of prefixes, and the steps that decode them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tests.worker.plans import PlanBuilder, blob

from stemserve.kernels.layout import Int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, decode_int32

VOCAB = 211
PAGE = 16
PAGES = 400
SLOTS = 48


@dataclass(kw_only=True)
class Decoded:
    """A leaf of its own below one of the shared nodes."""

    parent: int
    slot: int
    pages: list[int]
    stored: int  # tokens in the leaf
    drawn: int = 1  # of its request

    def pages_of(self, tokens: int) -> list[int]:
        return self.pages[: -(-tokens // PAGE)]


@dataclass(kw_only=True)
class Story:
    """A forest, what it holds, and the steps that decode it."""

    rng: np.random.Generator
    nodes: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])
    sequences: list[Decoded] = field(default_factory=list[Decoded])
    free: list[int] = field(default_factory=list[int])

    @classmethod
    def random(cls, seed: int, sequences: int, trunk: int = 0) -> "Story":
        """`trunk`: pages of a node above all others."""
        rng = np.random.default_rng(seed)
        story = cls(rng=rng, free=rng.permutation(PAGES).tolist())
        if trunk:
            story.nodes.append((-1, story.take(trunk)))
        for node in range(len(story.nodes), int(rng.integers(1, 5)) + len(story.nodes)):
            parent = int(rng.integers(-1 + bool(trunk), node)) if node else -1
            story.nodes.append((parent, story.take(int(rng.integers(1, 4)))))
        for slot in rng.permutation(SLOTS)[:sequences].tolist():
            story.sequences.append(
                Decoded(
                    parent=int(rng.integers(-1 + bool(trunk), len(story.nodes))),
                    slot=slot,
                    pages=story.take(5),
                    stored=int(rng.integers(1, 2 * PAGE)),
                )
            )
        return story

    def take(self, pages: int) -> list[int]:
        return [self.free.pop() for _ in range(pages)]

    def tokens(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, VOCAB, count).tolist()
        return tokens

    def prefill(self, samplers: Sequence[worker_pb2.Sampler]) -> worker_pb2.StepPlan:
        """All nodes and sequences; a sampler for each of these. Each draws its first token."""
        plan = PlanBuilder(page_size=PAGE)
        leaves = [(s.parent, s.stored, s.pages_of(s.stored)) for s in self.sequences]
        number, ends = self._add_forest(plan, leaves, set(range(len(self.nodes))))
        for node, (_, pages) in enumerate(self.nodes):
            plan.prefill(number[node], self.tokens(len(pages) * PAGE))
        for sequence, leaf, sampler in zip(self.sequences, ends, samplers, strict=True):
            row = plan.prefill(leaf, self.tokens(sequence.stored)) + sequence.stored - 1
            plan.sample(row, sequence.slot)
            plan.samplers.append(sampler)
        return plan.build()

    def decode(
        self, chosen: Sequence[Decoded], steps: Sequence[int], *, given: bool = False
    ) -> worker_pb2.StepPlan:
        """`steps` of each of the chosen, the largest being the burst's.

        `given`: the first tokens are random ones, not those drawn last.
        """
        plan = PlanBuilder(page_size=PAGE)
        leaves = [
            (s.parent, s.stored + 1, s.pages_of(s.stored + count))
            for s, count in zip(chosen, steps, strict=True)
        ]
        _, ends = self._add_forest(plan, leaves, self._above(s.parent for s in chosen))
        slots = np.full((max(steps), len(chosen)), -1, np.int32)
        for row, (sequence, leaf, count) in enumerate(zip(chosen, ends, steps, strict=True)):
            token = self.tokens(1)[0] if given else -1 - sequence.slot
            plan.sample(plan.decode(leaf, token), sequence.slot, sequence.drawn)
            at = sequence.stored + np.arange(count)
            slots[:count, row] = np.array(sequence.pages)[at // PAGE] * PAGE + at % PAGE
        built = plan.build()
        built.kv_slots = blob(slots.ravel().tolist())
        if max(steps) > 1:
            built.repeat, built.row_steps = max(steps), blob(steps)
        return built

    def verify(
        self, chosen: Sequence[Decoded], drafts: Sequence[Sequence[int]]
    ) -> worker_pb2.StepPlan:
        """A row for each token of a sequence's draft, the last that it drew first."""
        plan = PlanBuilder(page_size=PAGE)
        rows = [
            (sequence, at, token)
            for sequence, draft in zip(chosen, drafts, strict=True)
            for at, token in enumerate(draft)
        ]
        leaves = [(s.parent, s.stored + 1 + at, s.pages_of(s.stored + 1 + at)) for s, at, _ in rows]
        _, ends = self._add_forest(plan, leaves, self._above(s.parent for s in chosen))
        order = sorted(range(len(rows)), key=ends.__getitem__)
        for row in order:
            sequence, at, token = rows[row]
            plan.sample(plan.decode(ends[row], token), sequence.slot, sequence.drawn + at)
        return plan.build()

    def choose(self, among: Sequence[Decoded], count: int) -> list[Decoded]:
        order: list[int] = self.rng.permutation(len(among)).tolist()
        return [among[i] for i in order[:count]]

    def advance(self, chosen: Sequence[Decoded], steps: Sequence[int]) -> None:
        for sequence, count in zip(chosen, steps, strict=True):
            sequence.stored += count
            sequence.drawn += count

    def _above(self, nodes: Iterable[int]) -> set[int]:
        """The nodes and all above them."""
        used: set[int] = set()
        for node in nodes:
            while node >= 0:
                used.add(node)
                node = self.nodes[node][0]
        return used

    def _add_forest(
        self, plan: PlanBuilder, leaves: Sequence[tuple[int, int, list[int]]], used: set[int]
    ) -> tuple[dict[int, int], list[int]]:
        """Depth first; the numbers of the used nodes, and of the leaves."""
        number, ends = {-1: -1}, [0] * len(leaves)

        def add_below(parent: int) -> None:
            for node in sorted(used):
                if self.nodes[node][0] == parent:
                    pages = self.nodes[node][1]
                    number[node] = plan.node(len(pages) * PAGE, pages, number[parent])
                    add_below(node)
            for leaf, (above, tokens, pages) in enumerate(leaves):
                if above == parent:
                    ends[leaf] = plan.node(tokens, pages, number[parent])

        add_below(-1)
        return number, ends


def greedy(slot: int) -> worker_pb2.Sampler:
    return worker_pb2.Sampler(slot=slot, temperature=0.0, top_p=1.0)


def drawn(result: worker_pb2.StepResult) -> tuple[Int32, NDArray[np.float32]]:
    return (
        decode_int32("", result.sampled_tokens),
        decode_float32("", result.sampled_logprobs),
    )
