"""Parts of a Score job: each unit once, with the numbers that the whole answer has."""

import grpc
import numpy as np
import pytest
from tests.service.batcher_rig import Rig, make_rig
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, Served, serving
from tests.service.toy_jobs import expected_scores, label_job, likelihood_job, random_tokens
from tests.service.toy_model import state_of
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import ClientError, Mode, Scores
from stemserve.service.request import ScoreJob, ScorePart
from stemserve.service.workers.part_stream import PartStream

MODES: dict[str, Mode] = {
    "likelihood": inference_pb2.LogLikelihood(token_logprobs=True),
    "labels": inference_pb2.LabelProbabilities(labels=["a", "bc", "bd", "ef"], apply_softmax=True),
    "classes": inference_pb2.Classification(),
}
ITEMS = ["one", "two", "", "three", "a" * 80, "four", "five"]


def random_job(seed: int) -> ScoreJob:
    rng = np.random.default_rng(seed)
    contexts = [random_tokens(seed + n, int(rng.integers(1, 50))) for n in range(3)]
    items = [random_tokens(seed + 9 + n, int(rng.integers(1, 90))) for n in range(20)]
    of_item: list[int] = rng.integers(3, size=20).tolist()
    if seed % 2:
        return likelihood_job("job", contexts, items, of_item, parts=True)
    classify = seed % 4 == 0
    return label_job("job", contexts, items, [1, 2], of_item, parts=True, classify=classify)


def told(rig: Rig) -> list[ScorePart]:
    parts, rig.answers["job"].parts = rig.answers["job"].parts, []
    return parts


@pytest.mark.parametrize("seed", range(8))
def test_each_unit_is_told_once_and_what_it_needs_is_there_by_then(seed: int) -> None:
    rig, job = make_rig(budget=48), random_job(seed)
    logprobs, argmax, classes = expected_scores(job)
    rig.submit(job)
    units: list[int] = []
    while rig.turn():
        for part in told(rig):
            assert len(part.units) and not len(part.failed_units)
            units += part.units.tolist()
            gathers = np.isin(job.gather_unit, part.units)
            ids = np.repeat(gathers, np.diff(job.gather_indptr))
            np.testing.assert_array_equal(part.gather_logprobs[ids], logprobs[ids])
            np.testing.assert_array_equal(part.gather_argmax[gathers], argmax[gathers])
            if job.classify:
                np.testing.assert_array_equal(part.class_scores[part.units], classes[part.units])
    assert sorted(units) == list(range(20))
    assert rig.answers["job"].result is not None
    rig.batcher.check_idle()


def test_a_unit_that_failed_is_told_as_such() -> None:
    rig = make_rig()
    job = label_job("job", [[5]], [[1], [2], [3]], [0], parts=True)
    rig.worker.bad_states.add(state_of([5, 2]))
    rig.run(job)
    (part,) = told(rig)
    assert (part.units.tolist(), part.failed_units.tolist()) == ([0, 1, 2], [1])


def test_without_the_wish_no_part_is_told() -> None:
    rig = make_rig()
    rig.run(label_job("job", [[5]], [[1], [2]], [0]))
    assert not told(rig)


def part_of(*units: int) -> ScorePart:
    none = np.zeros(0, np.float32)
    return ScorePart(
        request_id="job",
        units=np.array(units, np.int32),
        failed_units=np.array(units[:1], np.int32),
        gather_logprobs=none,
        gather_argmax=np.zeros(0, np.int32),
        class_scores=none[:, None],
    )


async def test_a_reader_that_is_behind_gets_one_part_and_then_the_end() -> None:
    stream = PartStream()
    for part in (part_of(4, 7), part_of(1), part_of(0, 9)):
        stream.put(part)
    stream.fail(ValueError("end"))
    taken = await stream.take()
    assert isinstance(taken, ScorePart)
    assert taken.units.tolist() == [0, 1, 4, 7, 9]
    assert taken.failed_units.tolist() == [0, 1, 4]
    with pytest.raises(ValueError, match="end"):
        await stream.take()


def request_of(
    mode: str, options: inference_pb2.ScoreRequest | None = None
) -> inference_pb2.ScoreRequest:
    request = inference_pb2.ScoreRequest(query="Q", items=ITEMS, request_id="r")
    match MODES[mode]:
        case inference_pb2.LogLikelihood() as wanted:
            request.log_likelihood.CopyFrom(wanted)
        case inference_pb2.LabelProbabilities() as wanted:
            request.label_probabilities.CopyFrom(wanted)
        case inference_pb2.Classification() as wanted:
            request.classification.CopyFrom(wanted)
    request.MergeFrom(options or inference_pb2.ScoreRequest())
    return request


async def parts_of(
    served: Served, request: inference_pb2.ScoreRequest, most_items: int
) -> list[Scores]:
    return [part async for part in served.client.score_parts(request, most_items=most_items)]


def engine_of(mode: str) -> BigramEngine:
    classes = 3 if mode == "classes" else 0
    return BigramEngine(random_bigrams(BYTE_VOCABULARY), classes=classes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("most_items", "units"), [(1, 1), (2, 3), (100, 2), (100, 100)])
async def test_parts_together_are_the_whole_answer(mode: str, most_items: int, units: int) -> None:
    async with serving(engine_of(mode)) as served:
        served.engine.part_units, served.engine.failed_units = units, [1]
        whole = await served.client.score_request(request_of(mode))
        parts = await parts_of(served, request_of(mode), most_items)
    items = np.concatenate([part.item_index for part in parts])
    assert sorted(items.tolist()) == list(range(len(ITEMS)))
    for part in parts:
        assert 1 <= len(part.item_index) <= most_items
        np.testing.assert_array_equal(part.scores, whole.scores[part.item_index])
        if mode == "labels":
            np.testing.assert_array_equal(part.label_mass, whole.label_mass[part.item_index])
        if mode == "likelihood":
            np.testing.assert_array_equal(part.is_greedy, whole.is_greedy[part.item_index])
            for row, item in enumerate(map(int, part.item_index)):
                logprobs = whole.token_logprobs[item]
                np.testing.assert_array_equal(part.token_logprobs[row], logprobs)
    errors = sorted((error for part in parts for error in part.errors), key=lambda e: e.index)
    assert tuple(errors) == whole.errors and len(errors) == 3
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert parts[-1].usage == whole.usage and parts[-1].timing.total_seconds > 0


async def test_parts_come_before_the_rest_is_computed() -> None:
    async with serving(engine_of("likelihood")) as served:
        served.engine.parts_before_hold = 2
        served.engine.hold.clear()
        parts = served.client.score_parts(request_of("likelihood"), most_items=10)
        early = [await anext(parts), await anext(parts)]
        assert [len(part.item_index) for part in early] == [1, 1]
        served.engine.hold.set()
        assert sum([len(part.item_index) async for part in parts]) == len(ITEMS) - 2


async def test_items_that_the_deadline_cuts_off_are_in_the_last_parts() -> None:
    async with serving(engine_of("labels")) as served:
        served.engine.part_units = 2
        served.engine.unread_units = [0, 1]
        request = request_of("labels", inference_pb2.ScoreRequest(partial_results=True))
        parts = await parts_of(served, request, 10)
        assert parts[-1].partial and not any(part.partial for part in parts[:-1])
        late = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert {error.index for error in parts[-1].errors if error.code == late} == {0}


async def test_a_call_of_which_no_item_can_be_scored_has_one_part() -> None:
    async with serving(engine_of("likelihood")) as served:
        request = inference_pb2.ScoreRequest(query="Q", items=["", ""])
        request.log_likelihood.SetInParent()
        (part,) = await parts_of(served, request, 5)
        assert [error.index for error in part.errors] == [0, 1]
        assert np.isnan(part.scores).all()


async def test_parts_have_no_top_n() -> None:
    options = inference_pb2.ScoreRequest(top_n=2)
    async with serving(engine_of("likelihood")) as served:
        with pytest.raises(ClientError) as refused:
            await parts_of(served, request_of("likelihood", options), 5)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(refused.value.violations) == ["stream_items"]


async def test_leaving_between_parts_cancels_the_call() -> None:
    async with serving(engine_of("likelihood")) as served:
        served.engine.parts_before_hold = 1
        served.engine.hold.clear()
        parts = served.client.score_parts(request_of("likelihood"), most_items=10)
        await anext(parts)
        assert served.engine.running == 1
        await parts.aclose()
        await until(lambda: served.engine.running == 0)
