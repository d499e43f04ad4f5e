"""A job's rows and reads in the order in which they run."""

from dataclasses import replace

import numpy as np
import pytest
from tests.service.toy_jobs import label_job, likelihood_job, random_tokens

from stemserve.service.batching.scores.score_layout import Reads, lay_out
from stemserve.service.errors import EngineFault, InvalidRequest


def ids_of(reads: Reads, gather: int) -> list[int]:
    return list(map(int, reads.ids[reads.indptr[gather] : reads.indptr[gather + 1]]))


@pytest.mark.parametrize("seed", range(10))
def test_rows_and_reads_lead_back_to_the_job(seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = [random_tokens(n, int(rng.integers(1, 9))) for n in range(4)]
    items = [random_tokens(n, int(rng.integers(1, 6))) for n in range(12)]
    of_item: list[int] = rng.integers(4, size=12).tolist()
    job = likelihood_job("s", contexts, items, of_item)
    layout = lay_out(job)
    assert np.all(np.diff(job.unit_context[layout.unit_index]) >= 0)
    seen: dict[int, list[int]] = {}
    for at, unit in enumerate(layout.unit_index.tolist()):
        first, end = layout.row_indptr[at : at + 2]
        assert layout.row_token[first:end].tolist() == items[unit][:-1]  # the last is not read
        assert layout.row_offset[first:end].tolist() == list(range(end - first))
        a, b = layout.item_reads.within(int(first), int(end))
        for gather in range(a, b):
            row = int(layout.item_reads.row[gather] - first)
            assert ids_of(layout.item_reads, gather) == [items[unit][row + 1]]
            seen.setdefault(unit, []).append(int(layout.item_reads.index[gather]))
    for context in range(4):
        a, b = layout.context_reads.within(context, context + 1)
        for gather in range(a, b):
            unit = int(layout.context_reads.unit[gather])
            assert of_item[unit] == context
            assert ids_of(layout.context_reads, gather) == [items[unit][0]]
            seen.setdefault(unit, []).insert(0, int(layout.context_reads.index[gather]))
    wanted = {unit: np.flatnonzero(job.gather_unit == unit).tolist() for unit in range(12)}
    assert seen == wanted
    assert layout.prompt_tokens == sum(
        len(contexts[of_item[unit]]) + len(item) for unit, item in enumerate(items)
    )


@pytest.mark.parametrize("seed", range(5))
def test_one_read_behind_each_item_of_one_context_stays_as_it_was_sent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    context = random_tokens(0, int(rng.integers(1, 9)))
    items = [random_tokens(n + 1, int(rng.integers(1, 6))) for n in range(12)]
    job = label_job("s", [context], items, [3, 5])
    layout = lay_out(job)
    assert layout.item_reads.as_sent
    # The last item twice over is not in order, so that it is laid out as any other job.
    twice = lay_out(
        replace(
            job,
            gather_unit=np.append(job.gather_unit, np.int32(11)),
            gather_offset=np.append(job.gather_offset, job.gather_offset[-1]),
            gather_indptr=np.append(job.gather_indptr, job.gather_indptr[-1] + np.int32(2)),
            gather_ids=np.append(job.gather_ids, job.gather_ids[-2:]),
        )
    )
    assert not twice.item_reads.as_sent
    for name in ("row", "index", "unit"):
        found, wanted = getattr(layout.item_reads, name), getattr(twice.item_reads, name)
        assert found.tolist() == wanted[:12].tolist()
    for gather in range(12):
        assert ids_of(layout.item_reads, gather) == ids_of(twice.item_reads, gather) == [3, 5]
    names = ["row_token", "row_offset", "unit_rows", "row_indptr", "unit_index", "context_indptr"]
    for name in [*names, "context_lengths", "contexts", "prompt_tokens"]:
        found, wanted = getattr(layout, name), getattr(twice, name)
        assert np.asarray(found).tolist() == np.asarray(wanted).tolist()
        assert getattr(found, "dtype", None) == getattr(wanted, "dtype", None)
    assert not len(layout.context_reads.row)


def test_an_empty_item_is_read_at_the_end_of_its_context() -> None:
    job = likelihood_job("s", [[7]], [[1], [2, 3]])
    layout = lay_out(job)
    assert layout.unit_rows.tolist() == [0, 1]
    assert not layout.item_reads.as_sent
    assert layout.reads_context(0)


def test_contexts_without_items_run_only_if_there_are_no_items() -> None:
    contexts = [[1], [2, 3], [4]]
    assert lay_out(label_job("s", contexts, [[5]], [0], [1])).contexts.tolist() == [1]
    assert lay_out(label_job("s", contexts, [], [0])).contexts.tolist() == [0, 1, 2]


def test_reading_before_the_first_token_of_an_empty_context_is_refused() -> None:
    job = likelihood_job("s", [[7]], [[1, 2]])
    empty = likelihood_job("s", [[]], [[1, 2]])
    lay_out(empty)
    with pytest.raises(InvalidRequest):
        lay_out(replace(job, contexts=empty.contexts))


def test_reading_behind_a_unit_is_a_fault() -> None:
    job = label_job("s", [[7]], [[1, 2]], [0])
    with pytest.raises(EngineFault):
        lay_out(replace(job, gather_offset=np.array([2], np.int32)))
