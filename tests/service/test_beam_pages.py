"""The pages of a search's beams, beside a store of tokens that is read through them."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.beams.beam_pages import BeamPages
from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.sequence import Chain, pages_for
from stemserve.service.batching.steps.beam_rows import BeamRows
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.batching.steps.prefix_forest import PrefixForest, build_forest
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.request import Int32, Realm

PAGE = 4
ROW_ARRAYS = (
    *("token_ids", "positions", "kv_slots"),
    *("segment_indptr", "segment_kind", "segment_kernel"),
)
Stored = dict[int, list[int]]  # tokens of each page


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return random.Random(seed)


class Search:
    """Beams that get random parents and tokens. They may have half the pages, here and there."""

    def __init__(self, rng: random.Random, *, prompt: int, most: int, kv_pages: int) -> None:
        self.rng = rng
        self.cache = KvCache(2 * kv_pages, PAGE)
        self.foreign: Int32 = self.cache.allocator.allocate(2 * kv_pages)
        own = rng.sample(range(2 * kv_pages - 1), k=kv_pages - 1)
        self.cache.allocator.free([*own, 2 * kv_pages - 1])
        self.foreign = np.setdiff1d(self.foreign, [*own, 2 * kv_pages - 1])
        self.prompt = [rng.randrange(1000) for _ in range(prompt)]
        tokens: Int32 = np.array(self.prompt, np.int32)
        chain = self.cache.acquire(tokens, Realm(), self.new_step(), own_tail=True)
        assert chain is not None
        self.chain: Chain = chain
        self.pages = BeamPages(self.cache, chain, capacity=prompt + most)
        self.stored: Stored = {
            page: self.prompt[at * PAGE : (at + 1) * PAGE]
            for at, page in enumerate(chain.table.tolist())
        }
        self.beams: list[list[int]] = [[]]

    def end(self) -> None:
        self.pages.drop()
        self.cache.tree.release(self.chain.nodes)
        self.cache.allocator.free(self.foreign)
        self.cache.check_idle({})

    def new_step(self) -> StepBuilder:
        return StepBuilder(1, page_size=PAGE, max_rows=999)

    def fork(self, width: int) -> None:
        parents = sorted(self.rng.choices(range(len(self.beams)), k=width))
        if self.rng.random() < 0.5:
            self.rng.shuffle(parents)
        if self.rng.random() < 0.2 and width == len(self.beams):
            parents = list(range(width))
        length = len(self.prompt) + len(self.beams[0])
        self.pages.fork(np.array(parents, np.int32), length)
        self.beams = [[*self.beams[parent]] for parent in parents]

    def step(self, count: int) -> tuple[BeamRows, worker_pb2.StepPlan]:
        """Store a token of all beams, whose rows are in steps of at most `count`; the last one."""
        length, first = len(self.prompt) + len(self.beams[0]), 0
        while True:
            step = self.new_step()
            end = self.pages.prepare(first, min(first + count, len(self.beams)), length, step)
            rows, plan = self.run(first, end, length, step)
            if end == len(self.beams):
                return rows, plan
            first = end

    def run(
        self, first: int, end: int, length: int, step: StepBuilder
    ) -> tuple[BeamRows, worker_pb2.StepPlan]:
        tokens = [self.rng.randrange(1000) for _ in range(first, end)]
        rows = self.pages.rows(first, end, length)
        step.rows.add_beams(tokens, rows, 0)
        built = step.finish(self.cache.tree.release)
        assert built is not None
        plan = built[0]
        for source, page, count in unpack_int32(plan.copies).reshape(-1, 3).tolist():
            self.stored[page] = self.stored[source][:count]
        for token, slot in zip(tokens, unpack_int32(plan.kv_slots).tolist(), strict=True):
            page, offset = divmod(slot, PAGE)
            self.stored[page] = [*self.stored.get(page, [])[:offset], token]
        for beam, token in zip(self.beams[first:end], tokens, strict=True):
            beam.append(token)
        return rows, plan

    def read(self, rows: BeamRows, first: int) -> Iterator[tuple[list[int], list[int]]]:
        """What is stored of each sequence, and what should be."""
        for at, chain in enumerate(rows.chains, first):
            pages = chain.pages[: pages_for(chain.tokens, PAGE)].tolist()
            found = [token for page in pages for token in self.stored[page]]
            yield found[: chain.tokens], self.prompt + self.beams[at]


def unfolded(forest: PrefixForest) -> list[list[tuple[list[int], int]]]:
    """Pages and tokens of the nodes above each chain's end."""
    chains: list[list[tuple[list[int], int]]] = []
    for node in forest.chain_node.tolist():
        above: list[tuple[list[int], int]] = []
        while node >= 0:
            first, end = forest.node_page_indptr[node : node + 2]
            pages: list[int] = forest.node_pages[first:end].tolist()
            above.insert(0, (pages, int(forest.node_tokens[node])))
            node = int(forest.node_parent[node])
        chains.append(above)
    return chains


def assert_depth_first(forest: PrefixForest) -> None:
    path: list[int] = []
    for node, parent in enumerate(forest.node_parent.tolist()):
        while path and path[-1] != parent:
            path.pop()
        assert parent == (path[-1] if path else -1)
        path.append(node)


@pytest.mark.parametrize("run", range(30))
def test_beams_read_what_they_stored_and_their_forest_is_that_of_their_chains(
    rng: random.Random, run: int
) -> None:
    most, width = rng.randrange(1, 30), rng.choice([1, 2, 3, 8, 17])
    prompt = rng.randrange(1, 20)
    search = Search(rng, prompt=prompt, most=most, kv_pages=5 + width * (most // PAGE + 2))
    cache = search.cache
    held = cache.allocator.num_pages - cache.allocator.num_free
    for _ in range(most):
        search.fork(width if rng.random() < 0.8 else rng.randrange(1, width + 1))
        count = rng.choice([99, 99, 2])
        rows, plan = search.step(count)
        last = len(search.beams) - len(rows.own)
        for found, wanted in search.read(rows, last):
            assert found == wanted
        used = cache.allocator.num_pages - cache.allocator.num_free
        assert used == held + search.pages.num_pages
        forest, plain = rows.forest(PAGE), build_forest(rows.chains, PAGE)
        assert unfolded(forest) == unfolded(plain)
        assert len(forest.node_parent) == len(plain.node_parent)
        assert_depth_first(forest)
        assert unpack_int32(plan.node_pages).tolist() == forest.node_pages.tolist()
        assert unpack_int32(plan.segment_node).tolist() == forest.chain_node.tolist()
    search.end()


def test_beams_without_a_page_wait_for_one(rng: random.Random) -> None:
    search = Search(rng, prompt=8, most=9, kv_pages=4)
    step = search.new_step()
    search.pages.fork(np.zeros(5, np.int32), 8)
    assert search.pages.prepare(0, 5, 8, step) == 2  # the prompt has two of the four
    assert search.pages.prepare(2, 5, 8, step) == 2
    search.beams = [[] for _ in range(5)]
    search.run(0, 2, 8, search.new_step())
    step.pages_blocked = True
    assert search.pages.prepare(2, 5, 8, step) == 2
    search.end()


def test_beams_alone_are_written_as_beside_others(rng: random.Random) -> None:
    search = Search(rng, prompt=rng.randrange(1, 20), most=9, kv_pages=60)
    search.fork(5)
    rows, plan = search.step(99)
    tokens = unpack_int32(plan.token_ids).tolist()
    plans: list[worker_pb2.StepPlan] = []
    for others in (0, 1):
        step = search.new_step()
        step.rows.add_beams(tokens, rows, 3)
        one: Int32 = np.ones(others, np.int32)
        if others:
            step.rows.add_items(one, one - 1, one, None, 0)
        plans.append(worker_pb2.StepPlan())
        step.rows.write(plans[-1])
    for name in ROW_ARRAYS:
        alone, beside = (unpack_int32(getattr(plan, name)).tolist() for plan in plans)
        assert alone == beside[:-1] and len(alone) in (5, 6)
    assert unpack_int32(plans[0].positions).tolist() == [len(search.prompt)] * 5
