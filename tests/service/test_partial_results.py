"""At its deadline a call with partial_results is answered with what there is."""

from dataclasses import replace

import grpc
import numpy as np
import pytest
from tests.service.batcher_rig import Rig, make_rig
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, serving
from tests.service.toy_jobs import label_job, likelihood_job, random_tokens

from stemserve.proto.v1 import inference_pb2
from stemserve.service.errors import DeadlinePassed
from stemserve.service.request import ScoreResult

ITEMS = [random_tokens(n, 20) for n in range(12)]
CONTEXT = random_tokens(99, 30)


def result_at_deadline(rig: Rig, turns: int) -> ScoreResult:
    """Of a job called "partial", cut after some answered steps."""
    for _ in range(turns):
        rig.turn()
    rig.now = 5.0
    rig.plan()
    result = rig.answers["partial"].result
    assert result is not None
    while rig.turn():
        pass
    rig.batcher.check_idle()
    return result


@pytest.mark.parametrize("turns", [0, 1, 2, 4])
def test_what_was_scored_in_time_is_right_and_the_rest_is_named(turns: int) -> None:
    whole = make_rig().run(likelihood_job("whole", [CONTEXT], ITEMS))[0].result
    assert whole is not None
    rig = make_rig()
    job = likelihood_job("partial", [CONTEXT], ITEMS, deadline=4.0, partial=True)
    rig.submit(job)
    result = result_at_deadline(rig, turns)
    unread = np.isin(job.gather_unit, result.unread_units)
    assert 0 < len(result.unread_units) <= len(ITEMS)
    assert (len(result.unread_units) == len(ITEMS)) == (turns == 0)
    read = ~np.repeat(unread, np.diff(job.gather_indptr))
    np.testing.assert_array_equal(result.gather_logprobs[read], whole.gather_logprobs[read])


def test_a_job_that_ends_in_time_misses_nothing() -> None:
    rig = make_rig()
    job = label_job("partial", [CONTEXT], ITEMS, [1, 2], deadline=4.0, partial=True)
    result = rig.run(job)[0].result
    assert result is not None and not len(result.unread_units)
    assert np.isfinite(result.gather_logprobs).all()


def test_items_that_were_not_classified_are_named() -> None:
    rig = make_rig()
    rig.submit(
        replace(
            likelihood_job("partial", [CONTEXT], ITEMS, deadline=4.0, partial=True), classify=True
        )
    )
    result = result_at_deadline(rig, 3)
    assert 0 < len(result.unread_units) < len(ITEMS)
    read = np.setdiff1d(np.arange(len(ITEMS)), result.unread_units)
    assert np.isfinite(result.class_scores[read]).all()


def test_without_the_wish_the_whole_call_fails() -> None:
    rig = make_rig()
    rig.submit(likelihood_job("strict", [CONTEXT], ITEMS, deadline=4.0))
    rig.turn()
    rig.now = 5.0
    rig.plan()
    assert isinstance(rig.answers["strict"].error, DeadlinePassed)


async def test_the_answer_has_scores_errors_and_a_flag() -> None:
    async with serving(BigramEngine(random_bigrams(BYTE_VOCABULARY))) as served:
        served.engine.unread_units = [1]
        request = inference_pb2.ScoreRequest(
            query="Q",
            items=["a", "b", "c"],
            log_likelihood=inference_pb2.LogLikelihood(),
            partial_results=True,
            top_n=3,
        )
        scores = await served.client.score_request(request)
        assert scores.partial
        assert sorted(scores.item_index.tolist()) == [0, 2]
        (error,) = scores.errors
        assert (error.index, error.code) == (1, grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
        (job,) = served.engine.jobs
        assert job.deadline is None
        served.engine.unread_units = []
        assert not (await served.client.score_request(request)).partial
