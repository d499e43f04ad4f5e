"""Every limit is documented, reported, and refused as the documentation says."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, Served, serving
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.calls.validation import MAX_ID_CHARACTERS
from stemserve.service.client import ClientError
from stemserve.service.limits import Limits

TABLE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
ROW = re.compile(r"\| `(max_\w+)` \| (\d+) \| .+ \| (.+) \|")
# What they bound is behind the engine, or ends something that runs.
ELSEWHERE = {
    "max_compile_ms": "test_constraint_compiler.py",
    "max_stream_calls": "test_score_stream.py",
    "max_unread_tokens": "test_token_stream.py",
    "max_queued_requests": "test_batcher_queue.py",
    "max_queued_tokens": "test_batcher_queue.py",
    "max_queued_ms": "test_batcher_queue.py",
    "max_step_tokens": "test_batcher.py",
    "max_chat_render_ms": "test_chat.py",
}
MODE = inference_pb2.LogLikelihood()
Offence = Callable[[Served], Awaitable[Any]]


def documented() -> dict[str, tuple[int, str]]:
    """Default and refusal by name, in the order of the table."""
    rows = ROW.findall(TABLE.read_text())
    return {name: (int(default), refusal) for name, default, refusal in rows}


def score(*items: str) -> Offence:
    return lambda served: served.client.score(items, MODE, query="q")


def score_labels(*labels: str) -> Offence:
    mode = inference_pb2.LabelProbabilities(labels=labels)
    return lambda served: served.client.score(["a"], mode, query="q")


def score_contexts(*texts: str) -> Offence:
    contexts = [inference_pb2.Context(text=text) for text in texts]
    return lambda served: served.client.score(["a"], MODE, contexts=contexts)


def generate(**fields: Any) -> Offence:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text="a"), max_new_tokens=1, **fields
    )

    async def offend(served: Served) -> None:
        async for _ in served.client.generate(request):
            pass

    return offend


def generate_chat(*contents: str) -> Offence:
    messages = [inference_pb2.ChatMessage(role="user", content=text) for text in contents]
    request = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages))

    async def offend(served: Served) -> None:
        async for _ in served.client.generate(request):
            pass

    return offend


async def register_two(served: Served) -> None:
    for text in ("abc", "xyz"):
        await served.client.register(prefixes_pb2.RegisterRequest(text=text))


async def send_metadata(served: Served) -> None:
    channel: Any = served.channel
    call = channel.unary_unary("/stemserve.v1.Info/GetLimits")
    try:
        await call(b"", metadata=(("x", "v" * 3_000),))
    except grpc.aio.AioRpcError as error:
        raise ClientError(error.code(), error.details() or "") from error


async def call_twice_at_once(served: Served) -> None:
    served.engine.hold.clear()
    first = asyncio.create_task(served.client.score(["a"], MODE, query="q"))
    await until(lambda: served.engine.running == 1)
    try:
        await served.client.score(["a"], MODE, query="q")
    finally:
        served.engine.hold.set()
        await first


TWO_SEQUENCES = inference_pb2.PackedTokens(tokens=bytes(8), offsets=[0, 1, 2])


async def upload_two(served: Served) -> None:
    for text in ("abc", "xyz"):
        await served.client.tries.upload([text])


OFFENCES: dict[str, tuple[int, Offence]] = {
    "max_message_bytes": (1_000, score("a" * 2_000)),
    "max_metadata_bytes": (2_000, send_metadata),
    "max_concurrent_calls": (1, call_twice_at_once),
    "max_contexts": (1, score_contexts("a", "b")),
    "max_items": (1, score("a", "b")),
    "max_labels": (1, score_labels("a", "b")),
    "max_label_tokens": (1, score_labels("ab")),
    "max_request_tokens": (4, score_contexts("abcde")),
    "max_text_characters": (4, score("abcde")),
    "max_chat_messages": (1, generate_chat("a", "b")),
    "max_n": (1, generate(n=2)),
    "max_beams": (1, generate(beam_search=inference_pb2.BeamSearch(width=2))),
    "max_stop_strings": (1, generate(stop=["a", "b"])),
    "max_stop_characters": (1, generate(stop=["ab"])),
    "max_top_logprobs": (1, generate(top_logprobs=2)),
    "max_choices": (1, generate(choice=inference_pb2.Choices(texts=["a", "b"]))),
    "max_token_sequences": (1, generate(token_sequences=TWO_SEQUENCES)),
    "max_tries": (1, upload_two),
    "max_trie_bytes": (20, upload_two),
    "max_constraint_characters": (1, generate(regex="ab")),
    "max_prefixes": (1, register_two),
    "max_prefix_tokens": (5, register_two),
}


def byte_engine() -> BigramEngine:
    return BigramEngine(random_bigrams(BYTE_VOCABULARY))


def test_each_limit_is_in_the_table_with_its_default() -> None:
    defaults = asdict(Limits())
    assert {name: default for name, (default, _) in documented().items()} == defaults


def test_each_limit_has_a_test() -> None:
    assert {*OFFENCES, *ELSEWHERE} == {item.name for item in fields(Limits)}
    for file in ELSEWHERE.values():
        assert (Path(__file__).parent / file).is_file()


async def test_each_limit_is_reported() -> None:
    numbers = {item.name: 1_000_000 + at for at, item in enumerate(fields(Limits))}
    async with serving(byte_engine(), limits=Limits(**numbers)) as served:
        reported = await served.client.limits()
    assert {name: getattr(reported, name) for name in numbers} == numbers


@pytest.mark.parametrize("name", OFFENCES)
async def test_a_limit_is_refused_as_documented(name: str) -> None:
    limit, offend = OFFENCES[name]
    _, refusal = documented()[name]
    async with serving(byte_engine(), limits=Limits(**{name: limit})) as served:
        with pytest.raises(ClientError) as refused:
            await offend(served)
    assert refusal.startswith(refused.value.code.name)
    assert ("with RetryInfo" in refusal) == (refused.value.retry_after_s is not None)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [0] * (BYTE_VOCABULARY + 1)},
        {"sampling": inference_pb2.SamplingParams(banned_token_ids=[0] * (BYTE_VOCABULARY + 1))},
        {
            "sampling": inference_pb2.SamplingParams(
                logit_bias=dict.fromkeys(range(BYTE_VOCABULARY + 1), 1.0)
            )
        },
    ],
)
async def test_no_more_ids_are_taken_than_there_are_tokens(fields: dict[str, Any]) -> None:
    async with serving(byte_engine()) as served:
        with pytest.raises(ClientError, match=r"259 is more than the model's vocabulary \(258\)"):
            await generate(**fields)(served)


async def test_the_size_of_an_answer_is_worked_out_before_it_is_computed() -> None:
    engine = byte_engine()
    async with serving(engine, limits=Limits(max_message_bytes=2_000)) as served:
        with pytest.raises(ClientError, match="the answer would take"):
            mode = inference_pb2.LogLikelihood(token_logprobs=True)
            await served.client.score(["a" * 600], mode, query="q")
        with pytest.raises(ClientError, match="n: one message of the answer may take"):
            await generate(n=16, top_logprobs=20)(served)
        with pytest.raises(ClientError, match="top_logprobs: .* is more than max_top_logprobs"):
            await generate(top_logprobs=2**32 - 1)(served)
    assert not engine.jobs


async def test_an_answer_in_parts_is_measured_by_its_parts() -> None:
    labels = inference_pb2.LabelProbabilities(label_token_ids=range(20))
    request = inference_pb2.ScoreRequest(
        query="q", items=["a"] * 12 + [""] * 13, label_probabilities=labels
    )
    async with serving(byte_engine(), limits=Limits(max_message_bytes=2_000)) as served:
        with pytest.raises(ClientError, match="the answer would take 4000 bytes"):  # of errors
            await served.client.score_request(request)
        parts = [part async for part in served.client.score_parts(request, most_items=5)]
        with pytest.raises(ClientError, match="the answer would take 2240 bytes"):
            [part async for part in served.client.score_parts(request, most_items=14)]
    assert sorted(item for part in parts for item in part.item_index) == list(range(25))


async def test_the_tokens_of_named_prefixes_count_each_time() -> None:
    engine = byte_engine()
    async with serving(engine, limits=Limits(max_request_tokens=100)) as served:
        prefix = await served.client.register(prefixes_pb2.RegisterRequest(text="a" * 40))
        named = inference_pb2.Context(prefix_id=prefix.prefix_id)
        assert await served.client.score(["b"], MODE, contexts=[named] * 2)
        with pytest.raises(ClientError, match=r"contexts: 120 is more than max_request_tokens"):
            await served.client.score(["b"], MODE, contexts=[named] * 3)


async def test_a_long_id_is_not_sent_back() -> None:
    long = "x" * (MAX_ID_CHARACTERS + 1)
    async with serving(byte_engine()) as served:
        for use in (
            served.client.get_prefix,
            served.client.renew_prefix,
            served.client.release_prefix,
        ):
            with pytest.raises(ClientError, match="prefix_id: has 257 characters") as refused:
                await use(long)
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_the_rows_of_a_step_are_those_of_the_device_unless_they_are_set() -> None:
    assert Limits().on("cpu").max_step_tokens == 512
    assert Limits().on("cuda").max_step_tokens > 4096
    assert Limits(max_step_tokens=7).on("cuda").max_step_tokens == 7
