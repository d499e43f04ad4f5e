"""Score through a real socket."""

import asyncio

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, byte_tokenizer, serving
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import ClientError, token_blob
from stemserve.service.errors import QueueFull
from stemserve.service.limits import Limits
from stemserve.service.request import Int32, ScoreJob

LIKELIHOOD = inference_pb2.LogLikelihood()


def ids(*tokens: int) -> Int32:
    return np.array(tokens, dtype=np.int32)


def blob(*tokens: int) -> bytes:
    return token_blob(ids(*tokens))


def byte_engine(context_tokens: int = 64) -> BigramEngine:
    return BigramEngine(random_bigrams(BYTE_VOCABULARY), context_tokens=context_tokens)


def units(engine: BigramEngine, call: int = -1) -> list[list[int]]:
    job = engine.jobs[call]
    assert isinstance(job, ScoreJob)
    bounds = job.unit_indptr.tolist()
    return [job.unit_tokens[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def context(engine: BigramEngine, call: int = -1) -> list[int]:
    job = engine.jobs[call]
    assert isinstance(job, ScoreJob)
    tokens: list[int] = job.contexts[0].tolist()
    return tokens


async def test_b20_text_a_registered_prefix_and_token_ids_give_the_same_job_and_scores() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    async with serving(byte_engine(), tokenizer) as served:
        front = tokenizer.encode_front(["Q: "])[0]
        await served.client.register(prefixes_pb2.RegisterRequest(text="Q: ", prefix_id="q"))
        inline = await served.client.score(["yes", " no"], LIKELIHOOD, query="Q: ")
        named = await served.client.score(
            ["yes", " no"], LIKELIHOOD, contexts=[inference_pb2.Context(prefix_id="q")]
        )
        items = tokenizer.encode_continuations(["yes", " no"])
        tokens = await served.client.score_tokens(
            [items[0], items[1]],
            LIKELIHOOD,
            contexts=[inference_pb2.Context(tokens=token_blob(front))],
        )
        assert units(served.engine, 0) == units(served.engine, 1) == units(served.engine, 2)
        assert context(served.engine, 0) == context(served.engine, 1) == context(served.engine, 2)
        assert inline.scores.tolist() == named.scores.tolist() == tokens.scores.tolist()


async def test_b20_the_bos_stands_once_at_the_front_and_in_no_item() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    async with serving(byte_engine(), tokenizer) as served:
        mode = inference_pb2.LabelProbabilities(label_token_ids=[1])
        await served.client.score(["<bos>a", "a"], mode, query="<bos>Ans")
        assert context(served.engine).count(256) == 1
        assert context(served.engine)[0] == 256
        assert units(served.engine)[0] == units(served.engine)[1]


async def test_b07_the_items_after_a_prefix_do_not_change_the_prefix() -> None:
    async with serving(byte_engine()) as served:
        mode = inference_pb2.LabelProbabilities(label_token_ids=[1])
        alone = [await served.client.score([item], mode, query="P") for item in (" a", "a", "\n")]
        together = await served.client.score(["", " a", "a", "\n"], mode, query="P")
        assert [context(served.engine, call) for call in range(4)] == [context(served.engine)] * 4
        assert together.scores[1:, 0].tolist() == [float(one.scores[0, 0]) for one in alone]
        assert [error.index for error in together.errors] == [0]


async def test_b15_special_tokens_in_texts_and_items_make_no_boundaries() -> None:
    items = ["<eos>", "a<eos>b", "c"]
    async with serving(byte_engine()) as served:
        together = await served.client.score(items, LIKELIHOOD, query="x<eos>y")
        alone = [await served.client.score([i], LIKELIHOOD, query="x<eos>y") for i in items]
        assert together.scores.tolist() == [float(one.scores[0]) for one in alone]
        assert len(set(together.scores.tolist())) == 3


@pytest.mark.parametrize(("length", "fits"), [(63, True), (64, True), (65, False)])
async def test_b34_context_and_item_may_fill_the_models_context_exactly(
    length: int, fits: bool
) -> None:
    async with serving(BigramEngine()) as served:
        contexts = [inference_pb2.Context(tokens=blob(*[0] * 60))]
        call = served.client.score_tokens(
            [ids(*[1] * (length - 60))], LIKELIHOOD, contexts=contexts
        )
        if fits:
            assert np.isfinite((await call).scores).all()
            return
        with pytest.raises(ClientError, match="65 tokens.* 64") as refusal:
            await call
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_b14_a_long_item_beside_others_is_an_error_of_that_item() -> None:
    async with serving(BigramEngine()) as served:
        contexts = [inference_pb2.Context(tokens=blob(0, 1))]
        scores = await served.client.score_tokens(
            [ids(1), ids(*[1] * 4000), ids(2)], LIKELIHOOD, contexts=contexts
        )
        assert np.isnan(scores.scores).tolist() == [False, True, False]
        assert [(error.index, error.code) for error in scores.errors] == [(1, 3)]
        assert "4002 tokens" in scores.errors[0].message


async def test_truncated_items_keep_their_start() -> None:
    async with serving(BigramEngine()) as served:
        options = inference_pb2.ScoreRequest(truncate_item_tokens=2)
        contexts = [inference_pb2.Context(tokens=blob(0, 1))]
        cut, whole = [
            await served.client.score_tokens([item], LIKELIHOOD, contexts=contexts, options=options)
            for item in (ids(2, 2, *[1] * 100), ids(2, 2))
        ]
        assert cut.scores.tolist() == whole.scores.tolist()


async def test_a_context_that_fills_the_model_refuses_the_call() -> None:
    async with serving(BigramEngine()) as served:
        contexts = [inference_pb2.Context(tokens=blob(*[0] * 64))]
        with pytest.raises(ClientError, match=r"64 tokens.*no room") as refusal:
            await served.client.score_tokens([ids(1), ids(1, 1)], LIKELIHOOD, contexts=contexts)
        assert list(refusal.value.violations) == ["contexts[0]"]


async def test_many_registered_documents_are_ranked_by_one_query() -> None:
    async with serving(byte_engine()) as served:
        documents = ["one", "two", "three"]
        prefixes = [
            await served.client.register(prefixes_pb2.RegisterRequest(text=text))
            for text in documents
        ]
        ranked = await served.client.rank("q?", [prefix.prefix_id for prefix in prefixes])
        alone = [await served.client.score(["q?"], LIKELIHOOD, query=text) for text in documents]
        assert ranked.scores.tolist() == [float(one.scores[0]) for one in alone]


async def test_an_answer_says_what_it_used_and_how_long_it_took() -> None:
    async with serving(byte_engine()) as served:
        scores = await served.client.score(["ab", "c"], LIKELIHOOD, query="xyz")
        usage = scores.usage
        assert usage.prompt_tokens == 6
        assert usage.prompt_tokens == (
            usage.cached_tokens + usage.shared_tokens + usage.computed_tokens
        )
        assert scores.timing.queue_seconds == 0.001
        assert scores.timing.total_seconds >= scores.timing.tokenize_seconds > 0


async def test_a_full_queue_says_when_to_retry() -> None:
    async with serving(BigramEngine()) as served:
        served.engine.error = QueueFull("the queue is full", retry_after_s=1.5)
        with pytest.raises(ClientError, match="the queue is full") as refusal:
            await served.client.score_tokens([ids(1, 1)], LIKELIHOOD)
        assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.value.retry_after_s == 1.5
        assert refusal.value.reason == "QUEUE_FULL"
        assert served.metric("admission_rejected_total", reason="queue_full", tenant="other") == 1


async def test_an_unforeseen_error_is_internal_and_the_next_call_works() -> None:
    async with serving(BigramEngine()) as served:
        served.engine.error = RuntimeError("secret detail")
        with pytest.raises(ClientError, match="RuntimeError") as refusal:
            await served.client.score_tokens([ids(1, 1)], LIKELIHOOD)
        assert refusal.value.code is grpc.StatusCode.INTERNAL
        assert "secret" not in refusal.value.message
        served.engine.error = None
        await served.client.score_tokens([ids(1, 1)], LIKELIHOOD)


async def test_b50_a_score_call_that_is_cancelled_leaves_the_engine() -> None:
    async with serving(BigramEngine()) as served:
        served.engine.hold.clear()
        call = asyncio.create_task(served.client.score_tokens([ids(1, 1)], LIKELIHOOD))
        await until(lambda: served.engine.running == 1)
        call.cancel()
        await until(lambda: served.engine.running == 0)
        await until(
            lambda: (
                served.metric("requests_total", method="score", code="CANCELLED", tenant="other")
                == 1
            )
        )


async def test_b53_a_request_beyond_the_message_limit_is_refused_with_the_limit() -> None:
    limits = Limits(max_message_bytes=6 << 20)
    async with serving(BigramEngine(), limits=limits) as served:
        contexts = [inference_pb2.Context(tokens=blob(0))]
        fitting = [np.zeros(1_300, dtype=np.int32)] * 1_000 + [ids(1)]
        with pytest.raises(ClientError, match="max_request_tokens"):
            await served.client.score_tokens(fitting, LIKELIHOOD, contexts=contexts)
        with pytest.raises(ClientError, match=str(6 << 20)) as refusal:
            await served.client.score_tokens(fitting * 2, LIKELIHOOD, contexts=contexts)
        assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not served.engine.jobs


async def test_b53_a_request_of_more_than_five_mebibytes_is_accepted() -> None:
    async with serving(BigramEngine(), limits=Limits(max_request_tokens=2 << 20)) as served:
        mode = inference_pb2.LabelProbabilities(label_token_ids=[1])
        items = [ids(1), np.zeros(1_400_000, dtype=np.int32)]
        scores = await served.client.score_tokens(items, mode)
        assert [error.index for error in scores.errors] == [1]
        assert scores.scores[0, 0] == pytest.approx(0.6)


async def test_b53_an_answer_beyond_the_message_limit_is_refused_before_any_work() -> None:
    limits = Limits(max_message_bytes=4 << 20)
    async with serving(BigramEngine(random_bigrams(2000)), limits=limits) as served:
        mode = inference_pb2.LabelProbabilities(label_token_ids=range(1000))
        with pytest.raises(ClientError, match="max_message_bytes"):
            await served.client.score_tokens([ids(1)] * 1_100, mode)
        assert not served.engine.jobs


async def test_b53_an_answer_beyond_the_default_limit_of_grpc_arrives() -> None:
    """4.4 MB; the engine has 2,000 tokens."""
    async with serving(BigramEngine(random_bigrams(2000))) as served:
        mode = inference_pb2.LabelProbabilities(label_token_ids=range(1000))
        scores = await served.client.score_tokens([ids(1)] * 1_100, mode)
        assert scores.scores.shape == (1_100, 1_000)
        assert scores.scores.nbytes > 4 << 20


async def test_b51_a_deadline_that_passes_ends_the_call_and_its_job() -> None:
    async with serving(BigramEngine()) as served:
        served.engine.hold.clear()
        stub = served.channel.unary_unary(
            "/stemserve.v1.Inference/Score",
            request_serializer=inference_pb2.ScoreRequest.SerializeToString,
            response_deserializer=inference_pb2.ScoreResponse.FromString,
        )
        packed = inference_pb2.PackedTokens(tokens=blob(0, 1), offsets=[0, 2])
        request = inference_pb2.ScoreRequest(item_tokens=packed, log_likelihood=LIKELIHOOD)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub(request, timeout=0.1)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: served.engine.running == 0)
        (job,) = served.engine.jobs
        assert job.deadline is not None
