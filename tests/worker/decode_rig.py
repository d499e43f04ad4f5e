"""Sequences below a random forest of prefixes, and runners of a small model to decode them with.

The model has random weights and needs nothing but its description.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tests.worker.plans import PlanBuilder, blob

from stemserve.kernels.codec_decode import CodecDecode, DecodeNumbers
from stemserve.kernels.codec_division import Division
from stemserve.kernels.layout import Int32
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.engine_cost import BlockEngine
from stemserve.kernels.registry import deterministic_set, strategies
from stemserve.kernels.strategy import TORCH, Kernel
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, decode_int32
from stemserve.worker.dispatch import Dispatcher
from stemserve.worker.forward import Forward
from stemserve.worker.graphs.capture import Capture, GraphCapture, run_again
from stemserve.worker.graphs.decode_memory import DecodeMemory
from stemserve.worker.graphs.graph_decoder import GraphDecoder
from stemserve.worker.kv_pool import KvPool, KvShape
from stemserve.worker.models.loader import LoadFormat, fixed_ops, load_model
from stemserve.worker.runner import ModelRunner
from stemserve.worker.sampler import Sampler
from stemserve.worker.scorer import Scorer
from stemserve.worker.step_checks import StepLimits

VOCAB = 211
PAGE = 16
PAGES = 400
SLOTS = 48
MAX_BURST = 20
CPU = torch.device("cpu")
LIMITS = StepLimits(
    vocab_size=VOCAB,
    context_tokens=4096,
    page_size=PAGE,
    kv_pages=PAGES,
    sampler_slots=SLOTS,
    max_step_tokens=4096,
    has_lm_head=True,
    classes=0,
    max_burst_steps=MAX_BURST,
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# Bytes matter, launches hardly.
COSTS = CostTable(
    device="cpu",
    dtype="float32",
    query_heads=8,
    kv_heads=2,
    head_dim=32,
    threads=1,
    libraries={},
    engines={
        TORCH: BlockEngine(
            launch_seconds=1e-7,
            tile_rows=32,
            rows=(1, 1024),
            kv_tokens=(1, 1024),
            seconds=((1e-6, 1e-3), (1e-6, 1e-3)),
        )
    },
    corrections={},
)


@dataclass(frozen=True, kw_only=True)
class Rig:
    runner: ModelRunner
    pool: KvPool
    decoder: GraphDecoder | None  # None: launch by launch
    codec: CodecDecode | None  # of the graphs

    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        result = self.runner.step(plan)
        assert not result.error
        return result


def make_rig(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    buckets: Sequence[int] = (),  # rows of the graphs; none: launch by launch
    *,
    head_dim: int = 32,
    bins: int = 0,  # of the tree kernel; 0: as many as the device runs
    fixed_split: int = 0,  # tokens; 0: results may depend on the batch
) -> Rig:
    """All pages hold NaN. On a CPU the graphs' work is done anew each time."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"head_dim": head_dim}))
    model = load_model(
        folder,
        load_format=LoadFormat.DUMMY,
        dtype=dtype,
        device=device,
        make_ops=fixed_ops if fixed_split else None,
    )
    config = model.config
    shape = KvShape(
        layers=config.num_layers,
        pages=PAGES,
        page_size=PAGE,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    pool = KvPool(shape, device)
    pool.poison(np.arange(PAGES, dtype=np.int32))
    sampler = Sampler(SLOTS, device)
    scorer = Scorer(model, sampler, vocab_size=VOCAB, device=device)
    decoder = codec = None
    if buckets:
        bins = bins or 3 * (device == CPU)
        numbers, division = DecodeNumbers(dtype=dtype), Division(fixed_split=fixed_split)
        codec = CodecDecode(config.heads, device, numbers, bins, division=division)
        memory = DecodeMemory(model, pool, codec, sampler.tables, rows=buckets, steps=MAX_BURST)
        capture: Capture = run_again if device == CPU else GraphCapture(device)
        assert list(memory.capture(capture)) == sorted(buckets, reverse=True)
        decoder = GraphDecoder(memory, pool, codec, sampler, scorer, forced=None)
    available = strategies(config.heads, device=device, dtype=dtype, costs=COSTS)
    if fixed_split:
        available = deterministic_set(config.heads, device=device, dtype=dtype).strategies
    runner = ModelRunner(
        Forward(model, pool, sampler, LIMITS.max_step_tokens),
        pool,
        # On a GPU, so that no library is compiled for these heads.
        Dispatcher(available, COSTS, forced=None if device == CPU else Kernel.CODEC),
        sampler,
        scorer,
        LIMITS,
        decoder,
    )
    return Rig(runner=runner, pool=pool, decoder=decoder, codec=codec)


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
