"""A step for which there is no memory is run in parts, and answers the same."""

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.worker.plans import PlanBuilder, blob
from tests.worker.small_memory import SmallRunner, save_wide_model, small_runner
from tests.worker.test_burst import burst, prefill
from tests.worker.test_forest_step import random_forest
from tests.worker.test_mixed_step import REQUESTS, add
from tests.worker.test_process import Worker, start
from tests.worker.tiny_model import COSTS, VOCAB, save_tiny_model

from stemserve.kernels.pricing.cost_table_file import tables_json
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_float32, decode_int32
from stemserve.worker.memory.budget import MIB
from stemserve.worker.steps.smaller_steps import launch

ENOUGH = 1 << 20  # rows
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path, seed=31)
    return path


def runner(folder: Path, rows: int = ENOUGH) -> SmallRunner:
    return small_runner(folder, rows)


def step(tiny: SmallRunner, plan: PlanBuilder) -> worker_pb2.StepResult:
    return launch(tiny.runner, plan.build()).result()


def assert_equal(found: worker_pb2.StepResult, expected: worker_pb2.StepResult) -> None:
    for name in ("gather_logprobs", "sampled_logprobs", "top_logprobs", "class_scores"):
        values = [decode_float32(name, getattr(r, name)) for r in (found, expected)]
        np.testing.assert_allclose(values[0], values[1], atol=TOLERANCE, err_msg=name)
    for name in ("gather_argmax", "sampled_tokens", "top_indptr", "top_ids", "failed_rows"):
        numbers = [decode_int32(name, getattr(r, name)).tolist() for r in (found, expected)]
        assert numbers[0] == numbers[1], name


@contextmanager
def started(folder: Path) -> Generator[Worker]:
    yield from start(folder, folder / "w.sock")


@pytest.mark.parametrize("rows", [7, 12, 30, 60])
@pytest.mark.parametrize("seed", range(4))
def test_a_forest_in_parts_equals_the_forest_at_once(folder: Path, seed: int, rows: int) -> None:
    plan = random_forest(seed + 50).plan
    found = step(runner(folder, rows), plan)
    assert (found.memory_shortages > 0) == (len(plan.token_ids) > rows)
    assert not found.starved_rows
    assert_equal(found, step(runner(folder), plan))


@pytest.mark.parametrize("rows", [1, 2, 5, 20])
def test_requests_of_all_kinds_in_parts_equal_those_at_once(folder: Path, rows: int) -> None:
    plan = PlanBuilder()
    for number in range(len(REQUESTS)):
        add(plan, number)
    found = step(runner(folder, rows), plan)
    assert found.memory_shortages
    assert_equal(found, step(runner(folder), plan))


@pytest.mark.parametrize("rows", [5, 11])
def test_parts_draw_and_read_under_the_masks_of_the_whole(folder: Path, rows: int) -> None:
    rng = np.random.default_rng(rows)
    plan, legal = PlanBuilder(), list[list[int]]()
    for slot in range(6):
        tokens: list[int] = rng.integers(0, VOCAB, 5).tolist()
        plan.sample(plan.prefill(plan.node(5, [2 * slot, 2 * slot + 1]), tokens) + 4, slot)
        if slot % 2:
            plan.samplers.append(worker_pb2.Sampler(slot=slot, top_logprobs=3, reads_only=True))
        else:
            plan.samplers.append(worker_pb2.Sampler(slot=slot, temperature=9.0, seed=slot))
        legal.append(sorted(rng.permutation(VOCAB)[:4].tolist()))
    whole = plan.build()
    whole.masks.extend(
        worker_pb2.TokenMask(slot=slot, allowed_ids=blob(ids)) for slot, ids in enumerate(legal)
    )
    found = launch(runner(folder, rows).runner, whole).result()
    assert found.memory_shortages
    assert_equal(found, launch(runner(folder).runner, whole).result())
    drawn = decode_int32("sampled_tokens", found.sampled_tokens).tolist()
    assert all(drawn[slot] in legal[slot] for slot in range(0, 6, 2))
    assert [drawn[slot] for slot in range(1, 6, 2)] == [-1] * 3
    read = decode_int32("top_ids", found.top_ids).reshape(3, 3).tolist()
    assert all(set(read[n]) <= set(legal[2 * n + 1]) for n in range(3))


def test_copies_are_made_before_every_part(folder: Path) -> None:
    results: list[worker_pb2.StepResult] = []
    tokens = np.random.default_rng(5).integers(0, VOCAB, 11).tolist()
    for rows in (ENOUGH, 7):
        tiny = runner(folder, max(rows, 6))
        first = PlanBuilder()
        first.prefill(first.node(6, [0, 1]), tokens[:6])
        step(tiny, first)
        second = PlanBuilder()
        for branch in range(3):
            pages = [0, 2 + 2 * branch, 3 + 2 * branch]
            second.copies += [1, pages[1], 2]
            row = second.prefill(second.node(11, pages), [branch, *tokens[7:]])
            second.gather(row + 4, range(VOCAB))
        results.append(step(tiny, second))
    assert results[1].memory_shortages
    assert_equal(results[1], results[0])


def test_a_segment_that_does_not_fit_alone_starves_and_no_other(folder: Path) -> None:
    plan = PlanBuilder()
    node = plan.node(4, [0])
    row = plan.prefill(node, [1, 2, 3, 4])
    plan.gather(row + 3, [5])
    for length in (2, 9, 3):
        row = plan.item(node, range(length))
        plan.gather(row + length - 1, [7])
    found = step(runner(folder, 5), plan)
    assert decode_int32("", found.starved_rows).tolist() == list(range(6, 15))
    values = decode_float32("", found.gather_logprobs)
    expected = decode_float32("", step(runner(folder), plan).gather_logprobs)
    assert np.isnan(values[2])
    np.testing.assert_allclose(values[[0, 1, 3]], expected[[0, 1, 3]], atol=TOLERANCE)


def test_where_there_is_no_memory_at_all_that_is_soon_found_out(folder: Path) -> None:
    plan = PlanBuilder()
    for number in range(4):
        plan.prefill(plan.node(60, range(15 * number, 15 * number + 15)), [1] * 60)
    tiny = runner(folder, 0)
    found = step(tiny, plan)
    assert decode_int32("", found.starved_rows).tolist() == list(range(240))
    assert tiny.model.shortages == found.memory_shortages < 30


def test_tokens_drawn_by_an_attempt_that_failed_are_taken_back(folder: Path) -> None:
    """The greedy sample has drawn when memory runs out for the random one."""
    stories: list[list[list[int]]] = []
    for shortages in (0, 1):
        tiny = runner(folder)
        plan = PlanBuilder()
        for slot, temperature in enumerate((0.0, 1.5)):
            row = plan.prefill(plan.node(3, [4 * slot]), [slot + 1, 8, 9])
            plan.samplers.append(worker_pb2.Sampler(slot=slot, temperature=temperature, seed=3))
            plan.sample(row + 2, slot)
        drawn = [decode_int32("", step(tiny, plan).sampled_tokens).tolist()]
        for index in range(1, 5):
            tiny.model.failing_logits = shortages
            decode = PlanBuilder()
            for slot in range(2):
                pages = range(4 * slot, 4 * slot + 2)[: 1 + index // 2]
                row = decode.decode(decode.node(3 + index, list(pages)), -1 - slot)
                decode.sample(row, slot, index)
            drawn.append(decode_int32("", step(tiny, decode).sampled_tokens).tolist())
        assert tiny.model.shortages == 4 * shortages
        stories.append(drawn)
    assert stories[0] == stories[1]


def test_a_burst_in_parts_equals_the_burst_at_once(folder: Path) -> None:
    results: list[worker_pb2.StepResult] = []
    for rows in (ENOUGH, 1):
        tiny = runner(folder)
        tiny.runner.step(prefill(5))
        tiny.model.rows = rows
        plan = burst(1, {0: 4, 1: 2, 2: 3}, 4)
        results.append(launch(tiny.runner, plan).result())
    assert results[1].memory_shortages == 2
    counts = np.arange(4)[:, None] < [4, 2, 3]
    tokens = [decode_int32("", r.sampled_tokens).reshape(4, 3) for r in results]
    logprobs = [decode_float32("", r.sampled_logprobs).reshape(4, 3) for r in results]
    assert (tokens[0] == tokens[1])[counts].all()
    np.testing.assert_allclose(logprobs[0][counts], logprobs[1][counts], atol=TOLERANCE)


def test_a_step_that_breaks_the_contract_is_not_divided(folder: Path) -> None:
    plan = PlanBuilder()
    plan.prefill(plan.node(3, [0]), [1, 2, VOCAB])
    with pytest.raises(BadPlan, match="token_ids"):
        launch(runner(folder, 1).runner, plan.build())


def test_a_worker_process_that_may_have_no_more_memory_answers_the_same(tmp_path: Path) -> None:
    """A model whose step takes more than what is left for the process, and its half does not."""
    save_wide_model(tmp_path, seed=6)
    (tmp_path / "costs.json").write_text(tables_json([COSTS]))
    plan = PlanBuilder()
    for number in range(4):
        node = plan.node(60, range(15 * number, 15 * number + 15))
        row = plan.prefill(node, np.random.default_rng(number).integers(0, VOCAB, 60).tolist())
        for place in range(60):
            plan.gather(row + place, [3])
    with started(tmp_path) as worker:

        def ran() -> worker_pb2.StepResult:
            (response,) = worker.stub.Run(iter([worker_pb2.RunRequest(plan=plan.build())]))
            return response.result

        pid = worker.process.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 30 * MIB
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        found = ran()
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        expected = ran()
    assert found.memory_shortages and not found.starved_rows and not found.error
    assert not expected.memory_shortages
    assert_equal(found, expected)
