"""The Info service through a real socket."""

import asyncio

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, serving

import stemserve
from stemserve.proto.v1 import inference_pb2, info_pb2, prefixes_pb2, worker_pb2
from stemserve.service.calls.explanation import explained_step
from stemserve.service.client import ClientError
from stemserve.service.limits import Limits
from stemserve.service.request import Int32, Job


class SlowExplainer(BigramEngine):
    """Explains nothing, once it may go on."""

    def __init__(self) -> None:
        super().__init__(random_bigrams(BYTE_VOCABULARY))
        self.explaining, self.go_on = asyncio.Event(), asyncio.Event()

    async def explain(
        self, job: Job
    ) -> list[tuple[worker_pb2.StepPlan, worker_pb2.PredictResponse, Int32]]:
        self.explaining.set()
        await self.go_on.wait()
        return []


def blob(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


async def test_the_model_is_described_with_its_classes_and_the_version() -> None:
    async with serving(BigramEngine(classes=2)) as served:
        model = await served.client.model()
        assert (model.model, model.vocab_size, model.context_tokens) == ("bigram", 3, 64)
        assert list(model.class_labels) == ["class 0", "class 1"]
        assert model.version == stemserve.__version__


async def test_the_limits_are_the_ones_that_validation_uses() -> None:
    async with serving(BigramEngine(), limits=Limits(max_items=7, max_n=3)) as served:
        limits = await served.client.limits()
        assert (limits.max_items, limits.max_n, limits.max_labels) == (7, 3, 1024)
        assert (limits.page_size, limits.kv_pages) == (16, 100)
        items = [np.zeros(1, dtype=np.int32)] * 8
        with pytest.raises(ClientError, match=r"8 is more than max_items \(7\)"):
            await served.client.score_tokens(items, inference_pb2.LogLikelihood())


async def test_the_load_counts_pages_and_prefixes() -> None:
    async with serving(BigramEngine(random_bigrams(BYTE_VOCABULARY))) as served:
        await served.client.register(prefixes_pb2.RegisterRequest(text="abc"))
        load = await served.client.load()
        assert (load.free_pages, load.used_pages, load.registered_prefixes) == (90, 6, 1)


async def test_explain_needs_a_request() -> None:
    async with serving(BigramEngine()) as served:
        with pytest.raises(ClientError, match="set score or generate"):
            await served.client.explain(info_pb2.ExplainRequest())


async def test_one_call_is_explained_at_a_time_and_more_are_refused() -> None:
    engine = SlowExplainer()
    request = info_pb2.ExplainRequest(
        score=inference_pb2.ScoreRequest(
            items=["a"], query="q", log_likelihood=inference_pb2.LogLikelihood()
        )
    )
    async with serving(engine) as served:
        first = asyncio.create_task(served.client.explain(request))
        await engine.explaining.wait()
        with pytest.raises(ClientError, match="another call is explained") as refused:
            await served.client.explain(request)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.retry_after_s == 1.0
        engine.go_on.set()
        await first
        assert await served.client.explain(request)


def test_an_explained_node_is_read_by_the_rows_of_all_segments_below_it() -> None:
    plan = worker_pb2.StepPlan(
        token_ids=blob(*range(7)),
        segment_indptr=blob(0, 4, 6, 7),
        segment_node=blob(0, 2, -1),
        node_parent=blob(-1, 0, 1, 0),
        node_tokens=blob(16, 16, 5, 16),
    )
    step = explained_step(plan, worker_pb2.PredictResponse(), np.array([16, 0, 0, 16]))
    assert [node.rows for node in step.nodes] == [6, 2, 2, 0]
    assert [node.parent for node in step.nodes] == [-1, 0, 1, 0]
    assert [node.kv_tokens for node in step.nodes] == [16, 16, 5, 16]
    assert [node.cached_tokens for node in step.nodes] == [16, 0, 0, 16]
    assert step.rows == 7


def test_an_explained_group_names_each_strategy_and_its_refusal() -> None:
    prediction = worker_pb2.PredictResponse(
        groups=[
            worker_pb2.GroupPrediction(
                phase="prefill",
                chosen=inference_pb2.KERNEL_CASCADE,
                reason="cost_model",
                rows=3,
                segments=2,
                strategies=[
                    worker_pb2.StrategyPrediction(
                        kernel=inference_pb2.KERNEL_CASCADE, predicted_seconds=0.5, kv_read_bytes=9
                    ),
                    worker_pb2.StrategyPrediction(
                        kernel=inference_pb2.KERNEL_MULTI_ITEM, refusal="no items"
                    ),
                ],
            )
        ]
    )
    plan = worker_pb2.StepPlan(segment_indptr=blob(0))
    (group,) = explained_step(plan, prediction, np.zeros(0, dtype=np.int32)).groups
    assert (group.phase, group.chosen, group.rows) == ("prefill", inference_pb2.KERNEL_CASCADE, 3)
    assert [cost.refusal for cost in group.strategies] == ["", "no items"]
    assert [cost.kv_read_bytes for cost in group.strategies] == [9, 0]
