"""Outcomes of calls that a router sent here, and their counts on a real port."""

from typing import Any

import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, serving

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc
from stemserve.service.affinity import EVICTED, FIRST, HOME, NO_KEY, AffinityLog
from stemserve.service.client import ClientError


def test_a_call_is_at_home_where_it_finds_its_prefix() -> None:
    log = AffinityLog()
    assert log.outcome("", "", found=True) == NO_KEY
    assert log.outcome("", "manual", found=False) == FIRST
    assert log.outcome("", "manual", found=True) == HOME
    assert log.outcome("", "manual", found=False) == EVICTED
    assert log.outcome("another tenant", "manual", found=False) == FIRST


def test_only_the_keys_of_late_are_remembered() -> None:
    log = AffinityLog(keys_kept=2)
    for key in ("a", "b", "a", "c"):
        log.outcome("", key, found=False)
    assert log.outcome("", "b", found=False) == FIRST  # which puts it in the place of "a"
    assert log.outcome("", "c", found=False) == EVICTED
    assert log.outcome("", "a", found=False) == FIRST


async def test_calls_find_their_prefix_at_home() -> None:
    engine = BigramEngine(random_bigrams(BYTE_VOCABULARY))
    request = inference_pb2.ScoreRequest(query="q" * 40, items=["i"])
    request.log_likelihood.SetInParent()
    unknown = inference_pb2.ScoreRequest(
        contexts=[inference_pb2.Context(prefix_id="elsewhere")], items=["i"]
    )
    unknown.log_likelihood.SetInParent()
    async with serving(engine) as served:
        await served.client.score_request(request)
        with pytest.raises(ClientError):
            await served.client.score_request(unknown)
        stub: Any = inference_pb2_grpc.InferenceStub(served.channel)
        await stub.Score(request)  # without the client library's metadata
        assert served.metric("prefix_affinity_total", outcome="first") == 1
        assert served.metric("prefix_affinity_total", outcome="moved") == 1
        assert served.metric("prefix_affinity_total", outcome="nokey") == 1
