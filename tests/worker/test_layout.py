"""Groups of a step, against chains walked one by one."""

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.worker.plans import PlanBuilder

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.strategy import Phase
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.steps.layout import AttentionGroup, candidates, group
from stemserve.worker.steps.step import Step, decode_step

LIMITS = StepLimits(
    vocab_size=50,
    context_tokens=4096,
    page_size=4,
    kv_pages=4096,
    sampler_slots=4,
    max_step_tokens=4096,
    has_lm_head=True,
    classes=0,
)


def random_step(seed: int) -> Step:
    """Up to 40 nodes in several trees; segments of all kinds below random nodes."""
    rng = np.random.default_rng(seed)
    plan = PlanBuilder()
    next_page = 0
    path: list[int] = []  # from a root down to the last node: depth-first order
    leaves: list[int] = []
    for _ in range(rng.integers(1, 40)):
        path = path[: rng.integers(0, len(path) + 1)]
        pages = int(rng.integers(1, 4))
        parent = path[-1] if path else -1
        node = plan.node(4 * pages, range(next_page, next_page + pages), parent)
        next_page += pages
        path.append(node)
    for node in range(len(plan.parents)):
        if node not in plan.parents:
            plan.tokens[node] -= int(rng.integers(0, 4))
            leaves.append(node)
    for _ in range(rng.integers(1, 30)):
        kernel = int(rng.choice([0, 0, 0, 1]))
        tokens = rng.integers(0, 50, rng.integers(1, 6)).tolist()
        match int(rng.integers(4)):
            case 0:
                node = int(rng.choice(leaves))
                tokens = tokens[: plan.chain_tokens(node)]
                plan.prefill(node, tokens, stored=False, kernel=kernel)
            case 1:
                node = int(rng.choice(leaves))
                plan.prefill(node, tokens[:1], stored=False, kernel=kernel)
                plan.kinds[-1] = 2  # decode
            case _:
                node = int(rng.integers(-1, len(plan.parents)))
                plan.item(node, tokens, kernel=kernel)
    return decode_step(plan.build(), LIMITS)


def rows_of(attention_group: AttentionGroup, step: Step) -> NDArray[np.intp]:
    every_row: NDArray[np.intp] = np.arange(step.num_rows)
    return every_row[attention_group.rows]


def root(layout: AttentionLayout, node: int) -> int:
    chain = layout.chain(node)
    return chain[0] if chain else -1


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_in_one_group_with_the_chain_that_it_had(seed: int) -> None:
    step = random_step(seed)
    whole = step.layout
    rows_seen: list[int] = []
    for candidate in candidates(step):
        part = group(step, candidate.phase, candidate.segments)
        rows = rows_of(part, step)
        rows_seen += rows.tolist()
        for number, segment in enumerate(candidate.segments.tolist()):
            begin, end = part.layout.segment_indptr[number : number + 2]
            first, last = whole.segment_indptr[segment : segment + 2]
            assert rows[begin:end].tolist() == list(range(first, last))
            assert part.layout.segment_is_item[number] == whole.segment_is_item[segment]
            pages = part.layout.chain_pages(int(part.layout.segment_node[number]))
            pages_before = whole.chain_pages(int(whole.segment_node[segment]))
            assert pages.tolist() == pages_before.tolist()
            assert part.layout.chain_tokens[number] == whole.chain_tokens[segment]
    assert sorted(rows_seen) == list(range(step.num_rows))


@pytest.mark.parametrize("seed", range(40))
def test_a_group_is_one_tree_or_all_decode_rows_of_one_forced_kernel(seed: int) -> None:
    step = random_step(seed)
    keys = [
        (Phase.DECODE, None, kernel)
        if kind == 2
        else (Phase.PREFILL, root(step.layout, int(node)), kernel)
        for kind, node, kernel in zip(
            step.segment_kind, step.layout.segment_node, step.segment_kernel, strict=True
        )
    ]
    found = list(candidates(step))
    assert len(found) == len(set(keys))
    for candidate in found:
        (key,) = {keys[int(s)] for s in candidate.segments}
        assert key[2] == candidate.forced


@pytest.mark.parametrize("seed", range(40))
def test_a_group_holds_no_node_that_its_rows_do_not_read(seed: int) -> None:
    step = random_step(seed)
    for candidate in candidates(step):
        layout = group(step, candidate.phase, candidate.segments).layout
        read = {node for end in layout.segment_node for node in layout.chain(int(end))}
        assert read == set(range(layout.num_nodes))


@pytest.mark.parametrize("seed", range(10))
def test_one_by_one_reads_count_every_request_and_the_rows_of_items(seed: int) -> None:
    step = random_step(seed)
    for candidate in candidates(step):
        part = group(step, candidate.phase, candidate.segments)
        items = set(part.layout.segment_node[part.layout.segment_is_item].tolist())
        tokens = [
            sum(int(part.layout.node_tokens[n]) for n in part.layout.chain(int(node)))
            + (int(rows) if is_item else 0)
            for node, rows, is_item in zip(
                part.layout.segment_node,
                part.layout.segment_rows,
                part.layout.segment_is_item,
                strict=True,
            )
            if is_item or int(node) not in items
        ]
        assert part.kv_tokens_one_by_one == sum(tokens)


def test_contiguous_rows_are_a_slice() -> None:
    plan = PlanBuilder()
    plan.decode(plan.node(4, [0]), 1)
    plan.prefill(plan.node(4, [1]), [1, 2])
    plan.decode(plan.node(4, [2]), 1)
    step = decode_step(plan.build(), LIMITS)
    rows = {c.phase: group(step, c.phase, c.segments).rows for c in candidates(step)}
    assert rows[Phase.PREFILL] == slice(1, 3)
    decode_rows = rows[Phase.DECODE]
    assert not isinstance(decode_rows, slice)
    assert decode_rows.tolist() == [0, 3]
