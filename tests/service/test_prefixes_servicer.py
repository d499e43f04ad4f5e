"""The Prefixes service through a real socket."""

import asyncio
import math
import time

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, byte_tokenizer, serving

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import ClientError, token_blob
from stemserve.service.errors import InvalidRequest, NotReady
from stemserve.service.request import ScoreJob

Register = prefixes_pb2.RegisterRequest


def byte_engine() -> BigramEngine:
    return BigramEngine(random_bigrams(BYTE_VOCABULARY))


async def test_a_registered_prefix_can_be_read_listed_and_released() -> None:
    async with serving(byte_engine()) as served:
        made = await served.client.register(Register(text="hello", prefix_id="h", ttl_seconds=60))
        assert (made.prefix_id, made.token_count, made.ttl_seconds) == ("h", 5, 60)
        assert made.expires_unix_seconds == pytest.approx(time.time() + 60, abs=30)
        assert (await served.client.get_prefix("h")).token_count == 5
        assert [prefix.prefix_id for prefix in await served.client.list_prefixes()] == ["h"]
        await served.client.release_prefix("h")
        assert await served.client.list_prefixes() == ()


async def test_a_child_joins_its_parents_tokens_and_outlives_it() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    async with serving(byte_engine(), tokenizer) as served:
        await served.client.register(Register(text="ab", prefix_id="parent"))
        child = await served.client.register(
            Register(text="cd", parent_prefix_id="parent", prefix_id="child")
        )
        assert (child.token_count, child.parent_prefix_id) == (5, "parent")
        await served.client.release_prefix("parent")
        await served.client.score(
            ["x"],
            inference_pb2.LogLikelihood(),
            contexts=[inference_pb2.Context(prefix_id="child", text="ef")],
        )
        (job,) = served.engine.jobs
        assert isinstance(job, ScoreJob)
        assert tokenizer.decode(job.contexts[0].tolist()) == "abcdef"
        assert job.contexts[0].tolist().count(256) == 1


async def test_tokens_and_text_register_the_same_prefix() -> None:
    tokenizer = byte_tokenizer()
    async with serving(byte_engine(), tokenizer) as served:
        text = await served.client.register(Register(text="abc"))
        tokens = tokenizer.encode_front(["abc"])[0]
        again = await served.client.register(Register(tokens=token_blob(tokens)))
        assert again.prefix_id == text.prefix_id


async def test_b20_a_bos_makes_another_prefix_of_the_same_text() -> None:
    ids = set[str]()
    for adds_bos in (True, False):
        async with serving(byte_engine(), byte_tokenizer(adds_bos=adds_bos)) as served:
            ids.add((await served.client.register(Register(text="abc"))).prefix_id)
    assert len(ids) == 2


async def test_registering_other_content_under_an_id_already_exists() -> None:
    async with serving(byte_engine()) as served:
        await served.client.register(Register(text="a", prefix_id="x"))
        with pytest.raises(ClientError, match="other content") as refusal:
            await served.client.register(Register(text="b", prefix_id="x"))
        assert refusal.value.code is grpc.StatusCode.ALREADY_EXISTS


async def test_a_prefix_registered_twice_survives_one_release() -> None:
    async with serving(byte_engine()) as served:
        first = await served.client.register(Register(text="a"))
        second = await served.client.register(Register(text="a"))
        assert first.prefix_id == second.prefix_id
        await served.client.release_prefix(first.prefix_id)
        assert (await served.client.get_prefix(first.prefix_id)).token_count == 1


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Register(), "content"),
        (Register(text="a", ttl_seconds=-1), "ttl_seconds"),
        (Register(text="a", ttl_seconds=math.nan), "ttl_seconds"),
        (Register(text="a", prefix_id="x" * 300), "prefix_id"),
        (Register(tokens=b"abc"), "content[0].tokens"),
        (Register(tokens=token_blob(np.array([BYTE_VOCABULARY]))), "content[0].tokens"),
        (Register(text="a" * 64), "content"),
    ],
)
async def test_a_malformed_registration_is_refused_by_field(request_: Register, field: str) -> None:
    async with serving(byte_engine()) as served:
        with pytest.raises(ClientError) as refusal:
            await served.client.register(request_)
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(refusal.value.violations) == [field]


async def test_an_unknown_id_is_not_found_everywhere() -> None:
    async with serving(byte_engine()) as served:
        client = served.client
        for call in (
            client.get_prefix("x"),
            client.renew_prefix("x"),
            client.release_prefix("x"),
            client.register(Register(text="a", parent_prefix_id="x")),
        ):
            with pytest.raises(ClientError, match="'x' is not registered") as refusal:
                await call
            assert refusal.value.code is grpc.StatusCode.NOT_FOUND


async def test_warming_computes_the_prefix_and_reads_nothing() -> None:
    async with serving(byte_engine()) as served:
        await served.client.register(Register(text="abc", warm=True))
        (job,) = served.engine.jobs
        assert isinstance(job, ScoreJob)
        assert len(job.contexts[0]) == 3
        assert not len(job.unit_context)


async def test_a_warm_up_that_fails_registers_nothing() -> None:
    async with serving(byte_engine()) as served:
        served.engine.error = NotReady("the worker was lost")
        with pytest.raises(ClientError) as refusal:
            await served.client.register(Register(text="abc", warm=True))
        assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
        assert await served.client.list_prefixes() == ()


async def test_a_registration_that_fails_adds_no_owner() -> None:
    async with serving(byte_engine()) as served:
        await served.client.register(Register(text="abc", prefix_id="x"))
        served.engine.error = NotReady("no worker is ready")
        with pytest.raises(ClientError) as refusal:
            await served.client.register(Register(text="abc", prefix_id="x"))
        assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
        served.engine.error = None
        await served.client.release_prefix("x")
        assert await served.client.list_prefixes() == ()


async def test_a_pin_that_fails_leaves_a_registered_prefix_unpinned() -> None:
    async with serving(byte_engine()) as served:
        await served.client.register(Register(text="abc", prefix_id="x"))
        served.engine.error = NotReady("the worker was lost")
        with pytest.raises(ClientError):
            await served.client.register(Register(text="abc", prefix_id="x", pin=True))
        served.engine.error = None
        assert not (await served.client.get_prefix("x")).pinned
        assert (await served.client.register(Register(text="abc", prefix_id="x", pin=True))).pinned
        served.engine.error = NotReady("the worker was lost")
        with pytest.raises(ClientError):
            await served.client.register(Register(text="abc", prefix_id="x", pin=True))
        served.engine.error = None
        assert (await served.client.get_prefix("x")).pinned  # as the one before has asked


async def test_a_warm_up_that_fails_after_a_release_keeps_its_status() -> None:
    async with serving(byte_engine()) as served:
        served.engine.hold.clear()
        warming = asyncio.create_task(
            served.client.register(Register(text="abc", prefix_id="x", warm=True))
        )
        while not served.engine.running:
            await asyncio.sleep(0.01)
        await served.client.release_prefix("x")
        served.engine.error = InvalidRequest("content", "cannot be computed")
        served.engine.hold.set()
        with pytest.raises(ClientError, match="cannot be computed"):
            await warming


async def test_a_long_list_comes_in_pages() -> None:
    async with serving(byte_engine()) as served:
        for index in range(250):
            await served.client.register(Register(text="a", prefix_id=f"{index:03}"))
        listed = await served.client.list_prefixes()
        assert [prefix.prefix_id for prefix in listed] == [f"{index:03}" for index in range(250)]


async def test_renewing_changes_the_ttl() -> None:
    async with serving(byte_engine()) as served:
        await served.client.register(Register(text="a", prefix_id="x", ttl_seconds=5))
        assert (await served.client.renew_prefix("x", ttl_seconds=9)).ttl_seconds == 9
        assert (await served.client.renew_prefix("x")).ttl_seconds == 9
