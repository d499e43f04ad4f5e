"""A plan is decoded as it was built, and refused if anything in it is wrong."""

from collections.abc import Callable

import numpy as np
import pytest
from tests.worker.plans import LIMITS, PlanBuilder, blob

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.worker.blobs import BadPlan, encode_float32
from stemserve.worker.steps.step import decode_step


def good_plan() -> PlanBuilder:
    """A prefix of two pages; below it a prompt, a sequence that decodes, and an item."""
    plan = PlanBuilder()
    root = plan.node(8, [3, 4])
    prompt = plan.node(6, [5, 6], root)
    decoding = plan.node(2, [7], root)
    plan.prefill(prompt, [11, 12, 13])
    plan.decode(decoding, -1 - 2)
    row = plan.item(root, [21, 22])
    plan.gather(row, [1, 2, 2])
    plan.gather(0, [])
    plan.classify = [4]
    plan.sample(2, slot=1)
    plan.sample(2, slot=0, index=7)
    plan.samplers = [worker_pb2.Sampler(slot=1, temperature=0.5, top_p=0.3, seed=2**64 - 1)]
    plan.copies = [1, 2, 3]
    return plan


def test_a_good_plan_is_decoded_as_it_was_built() -> None:
    step = decode_step(good_plan().build(step_id=9), LIMITS)
    assert step.step_id == 9
    assert step.token_ids.tolist() == [11, 12, 13, -3, 21, 22]
    assert step.positions.tolist() == [11, 12, 13, 9, 8, 9]
    assert step.kv_slots.tolist() == [23, 24, 25, 29, -1, -1]
    assert step.layout.chain_tokens.tolist() == [14, 10, 8]
    assert step.layout.segment_is_item.tolist() == [False, False, True]
    assert step.gathers.indptr.tolist() == [0, 3, 3]
    assert step.samples.index.tolist() == [0, 7]
    assert step.copies.tolist() == [[1, 2, 3]]
    assert (step.samplers[0].seed, step.samplers[0].top_p) == (2**64 - 1, 0.3)


def test_items_without_a_context_need_no_forest() -> None:
    plan = PlanBuilder()
    plan.item(-1, [1, 2, 3])
    step = decode_step(plan.build(), LIMITS)
    assert step.layout.num_nodes == 0
    assert step.positions.tolist() == [0, 1, 2]


def test_a_row_that_runs_again_is_not_stored() -> None:
    plan = PlanBuilder()
    plan.prefill(plan.node(5, [1, 2]), [9], stored=False)
    assert decode_step(plan.build(), LIMITS).kv_slots.tolist() == [-1]


def test_a_page_of_two_nodes_is_accepted() -> None:
    """A chunk may end inside a page that another sequence of the step fills up."""
    plan = PlanBuilder()
    plan.prefill(plan.node(2, [1]), [1, 2])
    plan.prefill(plan.node(6, [1, 2]), [3, 4, 5, 6])
    assert decode_step(plan.build(), LIMITS).kv_slots.tolist() == [4, 5, 6, 7, 8, 9]


def test_b26_siblings_share_a_position() -> None:
    """Nodes 0 -> 1 -> {2 -> 4, 3 -> 5} in depth-first order, a page each, behind 8 tokens."""
    plan = PlanBuilder()
    node = plan.node(8, [0, 1])
    one = plan.node(4, [2], node)
    two = plan.node(4, [3], one)
    four = plan.node(4, [4], two)
    three = plan.node(4, [5], one)
    five = plan.node(4, [6], three)
    for last in (node, one, two, four, three, five):
        plan.decode(last, 1)
    assert decode_step(plan.build(), LIMITS).positions.tolist() == [7, 11, 15, 19, 15, 19]
    plan.positions[4:] = [23, 27]  # as if the first branch stood before the second
    with pytest.raises(BadPlan, match="row 4 has position 23"):
        decode_step(plan.build(), LIMITS)


def set_blob(name: str, values: list[int]) -> Callable[[worker_pb2.StepPlan], None]:
    return lambda plan: setattr(plan, name, blob(values))


def set_sampler(**fields: object) -> Callable[[worker_pb2.StepPlan], None]:
    def change(plan: worker_pb2.StepPlan) -> None:
        for name, value in fields.items():
            setattr(plan.samplers[0], name, value)

    return change


def append(name: str, raw: bytes) -> Callable[[worker_pb2.StepPlan], None]:
    return lambda plan: setattr(plan, name, getattr(plan, name) + raw)


def sample_twice(plan: worker_pb2.StepPlan) -> None:
    plan.sample_slots, plan.sample_index = blob([1, 1]), blob([3, 3])


V = LIMITS.vocab_size
BAD_PLANS: list[tuple[str, Callable[[worker_pb2.StepPlan], None]]] = [
    ("token_ids has 25 bytes", append("token_ids", b"x")),
    ("the step has 0 rows", set_blob("token_ids", [])),
    ("the step has 41 rows", set_blob("token_ids", [1] * 41)),
    ("5 token_ids, 6 positions", set_blob("token_ids", [1] * 5)),
    ("token_ids must be", set_blob("token_ids", [11, 12, 13, -5, 21, 22])),
    ("token_ids must be", set_blob("token_ids", [11, 12, V, -3, 21, 22])),
    ("positions must be", set_blob("positions", [11, 12, 64, 9, 8, 9])),
    ("row 2 has position 14", set_blob("positions", [11, 12, 14, 9, 8, 9])),
    ("row 4 has position 9", set_blob("positions", [11, 12, 13, 9, 9, 10])),
    ("kv_slots must be", set_blob("kv_slots", [23, 24, 25, 128, -1, -1])),
    ("kv_slots must be", set_blob("kv_slots", [23, 24, 25, -2, -1, -1])),
    ("kv_slots must differ", set_blob("kv_slots", [23, 24, 24, 29, -1, -1])),
    ("row 3 goes to slot 30", set_blob("kv_slots", [23, 24, 25, 30, -1, -1])),
    ("an item's rows are not stored", set_blob("kv_slots", [23, 24, 25, 29, 40, -1])),
    ("segment_indptr has 3 numbers", set_blob("segment_indptr", [0, 3, 6])),
    ("segment_indptr must rise from 0 to 6", set_blob("segment_indptr", [0, 3, 4, 5])),
    ("segment_indptr must rise", set_blob("segment_indptr", [0, 4, 3, 6])),
    ("without rows", set_blob("segment_indptr", [0, 4, 4, 6])),
    ("exactly one row", set_blob("segment_indptr", [0, 2, 4, 6])),
    ("segment_kind must be", set_blob("segment_kind", [1, 2, 4])),
    ("segment_kind must be", set_blob("segment_kind", [0, 2, 3])),
    ("segment_kernel must be", set_blob("segment_kernel", [0, 0, 9])),
    ("segment_kernel differ", set_blob("segment_kernel", [0, 0])),
    ("segment_node must be", set_blob("segment_node", [1, 2, 3])),
    ("needs a node", set_blob("segment_node", [1, -1, 0])),
    ("a parent must come before", set_blob("node_parent", [-1, 1, 0])),
    ("a parent must come before", set_blob("node_parent", [-1, 2, 0])),
    ("node_parent must be", set_blob("node_parent", [-2, 0, 0])),
    ("node_page_indptr must rise", set_blob("node_page_indptr", [0, 2, 4, 6])),
    ("node_page_indptr has 3", set_blob("node_page_indptr", [0, 2, 5])),
    ("node_pages must be", set_blob("node_pages", [3, 4, 5, 32, 7])),
    ("node_pages must be", set_blob("node_pages", [3, 4, 5, -1, 7])),
    ("must end at the end of a page", set_blob("node_tokens", [7, 6, 2])),
    ("reach into its last page", set_blob("node_tokens", [8, 9, 2])),
    ("reach into its last page", set_blob("node_tokens", [8, 4, 2])),
    ("reach into its last page", set_blob("node_tokens", [8, 6, 0])),
    ("2 node_tokens", set_blob("node_tokens", [8, 6])),
    ("not a multiple of 3", set_blob("copies", [1, 2])),
    ("copies: pages", set_blob("copies", [1, 32, 3])),
    ("copies: tokens", set_blob("copies", [1, 2, 5])),
    ("copies: tokens", set_blob("copies", [1, 2, 0])),
    ("destination pages must differ", set_blob("copies", [1, 2, 3, 9, 2, 3])),
    ("is also a source", set_blob("copies", [1, 2, 3, 2, 9, 3])),
    ("gather_rows must be", set_blob("gather_rows", [4, 6])),
    ("gather_indptr must rise", set_blob("gather_indptr", [0, 4, 3])),
    ("gather_indptr has 2", set_blob("gather_indptr", [0, 3])),
    ("gather_ids must be", set_blob("gather_ids", [1, V, 2])),
    ("gather_ids must be", set_blob("gather_ids", [1, -1, 2])),
    ("classify_rows must be", set_blob("classify_rows", [-1])),
    ("sample_rows must be", set_blob("sample_rows", [2, 6])),
    ("sample_slots must be", set_blob("sample_slots", [1, 4])),
    ("sampled twice with one", sample_twice),
    ("2 sample_rows, 1 sample_slots", set_blob("sample_slots", [1])),
    ("sample_index must be", set_blob("sample_index", [0, -1])),
    ("the worker has 4 slots", set_sampler(slot=4)),
    ("temperature nan", set_sampler(temperature=float("nan"))),
    ("temperature -1", set_sampler(temperature=-1)),
    ("temperature inf", set_sampler(temperature=float("inf"))),
    ("top_p 1.5", set_sampler(top_p=1.5)),
    ("top_p nan", set_sampler(top_p=float("nan"))),
    ("min_p -0.5", set_sampler(min_p=-0.5)),
    ("top_logprobs 51", set_sampler(top_logprobs=V + 1)),
    ("bias_ids must be", set_sampler(bias_ids=blob([V]), bias_values=b"\0" * 4)),
    ("1 bias_ids but 2 bias_values", set_sampler(bias_ids=blob([1]), bias_values=b"\0" * 8)),
    (
        "a bias must not be NaN",
        set_sampler(bias_ids=blob([1]), bias_values=encode_float32(np.array([np.nan]))),
    ),
    (
        "a bias must not be NaN",
        set_sampler(bias_ids=blob([1]), bias_values=encode_float32(np.array([np.inf]))),
    ),
    ("banned_ids must be", set_sampler(banned_ids=blob([-1]))),
    ("min_tokens_banned_ids must be", set_sampler(min_tokens_banned_ids=blob([2**31 - 1]))),
    ("slots must differ", lambda plan: plan.samplers.append(plan.samplers[0])),
]


@pytest.mark.parametrize(("message", "spoil"), BAD_PLANS)
def test_a_bad_plan_is_refused(message: str, spoil: Callable[[worker_pb2.StepPlan], None]) -> None:
    plan = good_plan().build()
    spoil(plan)
    with pytest.raises(BadPlan, match=message):
        decode_step(plan, LIMITS)


def test_nodes_must_be_depth_first() -> None:
    plan = PlanBuilder()
    first, second = plan.node(4, [1]), plan.node(4, [2])
    child_of_first = plan.node(4, [3], first)
    plan.prefill(child_of_first, [1])
    plan.prefill(second, [1])
    with pytest.raises(BadPlan, match="depth-first"):
        decode_step(plan.build(), LIMITS)


def test_more_rows_than_the_chain_has_tokens_are_refused() -> None:
    plan = PlanBuilder()
    plan.prefill(plan.node(4, [1]), [1, 2, 3])
    plan.tokens[0] = 2
    with pytest.raises(BadPlan, match="more rows than its chain has tokens"):
        decode_step(plan.build(), LIMITS)


@pytest.mark.parametrize("cut", range(1, 8))
def test_random_bytes_never_pass_as_anything_but_a_bad_plan(cut: int) -> None:
    rng = np.random.default_rng(cut)
    names = [f.name for f in worker_pb2.StepPlan.DESCRIPTOR.fields if f.type == f.TYPE_BYTES]
    taken = 0
    for _ in range(300):
        plan = good_plan().build()
        for name in rng.choice(names, size=rng.integers(1, 3), replace=False):
            values = np.frombuffer(getattr(plan, name), "<i4").copy()
            if len(values):
                values[rng.integers(len(values))] = rng.choice([-(2**31), -1, 0, 1, 7, 2**31 - 1])
            setattr(plan, str(name), values[: len(values) - rng.integers(2)].tobytes())
        try:
            step = decode_step(plan, LIMITS)
        except BadPlan:
            continue
        taken += 1
        assert step.kv_slots.max() < LIMITS.kv_pages * LIMITS.page_size
        assert -LIMITS.sampler_slots <= step.token_ids.min()
        assert step.token_ids.max() < LIMITS.vocab_size
        assert step.positions.min() >= 0
        assert step.positions.max() < LIMITS.context_tokens
        for rows in (step.gathers.rows, step.samples.rows, step.classify_rows):
            assert ((rows >= 0) & (rows < step.num_rows)).all()
        assert step.layout.node_pages.max() < LIMITS.kv_pages
    assert taken


def test_every_kernel_may_be_forced() -> None:
    for kernel in inference_pb2.Kernel.values():
        plan = PlanBuilder()
        plan.prefill(plan.node(4, [1]), [1], kernel=kernel)
        assert decode_step(plan.build(), LIMITS).segment_kernel.tolist() == [kernel]
