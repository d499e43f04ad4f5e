"""The Tries service through a real socket, and the client that tells it its tries again."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, EOS_ID, Served, byte_tokenizer, serving
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2, tries_pb2, tries_pb2_grpc
from stemserve.service.calls.tries import trie_upload
from stemserve.service.client import Access, Client, ClientError
from stemserve.service.client.errors import client_error
from stemserve.service.client.tries import MESSAGE_SEQUENCES, MESSAGE_TEXT
from stemserve.service.config.access import AuthConfig, TenantConfig
from stemserve.service.config.server import ServerConfig
from stemserve.service.limits import Limits

Upload = tries_pb2.UploadTrieRequest


def byte_engine() -> BigramEngine:
    return BigramEngine(random_bigrams(BYTE_VOCABULARY))


def ids(*sequences: list[int]) -> list[Any]:
    return [np.array(each, np.int32) for each in sequences]


async def send(served: Served, messages: Sequence[Upload]) -> tries_pb2.UploadTrieResponse:
    async def each() -> AsyncGenerator[Upload, None]:
        for message in messages:
            yield message

    stub: Any = tries_pb2_grpc.TriesStub(served.channel)
    try:
        response: tries_pb2.UploadTrieResponse = await stub.UploadTrie(each())
    except grpc.aio.AioRpcError as error:
        raise client_error(error) from error
    return response


async def said(client: Client, trie_id: str) -> str:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text="say "), trie_id=trie_id, max_new_tokens=20
    )
    return "".join([news.text async for step in client.generate(request) for news in step.news])


async def test_a_trie_can_be_uploaded_read_listed_used_and_deleted() -> None:
    async with serving(byte_engine()) as served:
        tries = served.client.tries
        made = await tries.upload(["ab", "ac", "ab"], trie_id="t", ttl_seconds=60)
        assert (made.trie_id, made.sequences, made.nodes, made.ttl_seconds) == ("t", 2, 4, 60)
        assert made.expires_unix_seconds == pytest.approx(time.time() + 60, abs=30)
        assert 0 < made.num_bytes < 1_000
        assert (await tries.get("t")).sequences == 2
        assert [trie.trie_id for trie in await tries.list()] == ["t"]
        assert await said(served.client, "t") in ("ab", "ac")
        await until(lambda: served.metric("tries_registered") == 1)
        assert served.metric("trie_bytes") == made.num_bytes
        assert served.metric("constraints_total", kind="trie_id", cache="hit") == 1
        await tries.delete("t")
        assert await tries.list() == ()
        for act in (tries.get("t"), tries.delete("t"), said(served.client, "t")):
            with pytest.raises(ClientError, match="'t' is not there") as refused:
                await act
            assert refused.value.code is grpc.StatusCode.NOT_FOUND
        assert served.metric("constraints_total", kind="trie_id", cache="miss") == 1
        labels = {"method": "upload_trie", "code": "OK", "tenant": "other"}
        assert served.metric("requests_total", **labels) == 1


async def test_texts_and_ids_in_any_order_and_number_of_messages_are_one_set() -> None:
    rng = np.random.default_rng()
    sequences = [rng.integers(0, 256, 3) for _ in range(MESSAGE_SEQUENCES + 100)]
    texts = ["ab", "é", " x"]
    encoded = byte_tokenizer().encode_continuations(texts)
    async with serving(byte_engine()) as served:
        tries = served.client.tries
        first = await tries.upload(ids(*(each.tolist() for each in sequences)))
        again = await tries.upload(ids(*(each.tolist() for each in reversed(sequences))))
        assert first.trie_id == again.trie_id and len(await tries.list()) == 1
        assert first.sequences == len({tuple(each) for each in sequences})
        long = ["ab" * (MESSAGE_TEXT // 4) + end for end in "xyz"]
        with pytest.raises(ClientError, match="the model's context has"):
            await tries.upload(long)
        named = await tries.upload(texts)
        assert named.trie_id == (await tries.upload([encoded[i] for i in (2, 0, 1)])).trie_id
        mixed = [
            Upload(texts=texts[:1]),
            Upload(
                texts=texts[1:2],
                sequences=inference_pb2.PackedTokens(
                    tokens=encoded[2].tobytes(), offsets=[0, len(encoded[2])]
                ),
            ),
        ]
        assert (await send(served, mixed)).trie.trie_id == named.trie_id


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "none came"),
        ([Upload(trie_id="t")], "none came"),
        ([Upload(texts=["a", ""])], "none of them empty"),
        ([Upload(trie_id="t", texts=["a"]), Upload(trie_id="t")], "first message only"),
        ([Upload(texts=["a"]), Upload(ttl_seconds=1)], "first message only"),
        ([Upload(texts=["a"], ttl_seconds=-1)], "ttl_seconds"),
        ([Upload(texts=["a"], trie_id="x" * 300)], "trie_id: has 300"),
        ([Upload(texts=["a<eos>"])], "end-of-sequence"),
        (
            [Upload(sequences=inference_pb2.PackedTokens(tokens=b"abcde", offsets=[0, 1]))],
            "not a whole number",
        ),
    ],
)
async def test_what_is_no_set_is_refused(messages: list[Upload], problem: str) -> None:
    async with serving(byte_engine()) as served:
        with pytest.raises(ClientError, match=problem) as refused:
            await send(served, messages)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert await served.client.tries.list() == ()
        await until(lambda: served.metric("trie_bytes") == 0)


async def test_other_sequences_under_an_id_already_exist() -> None:
    async with serving(byte_engine()) as served:
        await served.client.tries.upload(["a"], trie_id="t")
        with pytest.raises(ClientError, match="other sequences") as refused:
            await served.client.tries.upload(["b"], trie_id="t")
        assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS


async def pausing() -> AsyncGenerator[Upload, None]:
    yield Upload(texts=["a"])
    await asyncio.sleep(60)


async def test_an_upload_has_the_default_deadline_of_calls() -> None:
    config = ServerConfig(default_deadline_s=0.1)
    async with serving(byte_engine(), server_config=config) as served:
        stub: Any = tries_pb2_grpc.TriesStub(served.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="the default here") as refused:
            await stub.UploadTrie(pausing())
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: served.metric("trie_bytes") == 0)


async def test_bytes_that_are_no_message_are_the_clients_fault() -> None:
    async with serving(byte_engine()) as served:
        channel: Any = served.channel
        call = channel.stream_unary("/stemserve.v1.Tries/UploadTrie")
        with pytest.raises(grpc.aio.AioRpcError, match="not a message of its type") as refused:
            await call(iter([b"\xff" * 9]))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_pause_in_an_upload_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie_upload, "LONGEST_PAUSE_S", 0.05)
    async with serving(byte_engine()) as served:
        stub: Any = tries_pb2_grpc.TriesStub(served.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="no message of the upload") as refused:
            await stub.UploadTrie(pausing())
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: served.metric("trie_bytes") == 0)


async def test_a_stop_id_may_come_behind_a_sequence_and_in_none() -> None:
    async with serving(byte_engine()) as served:
        await served.client.tries.upload(ids([1, 2], [1]), trie_id="t")
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Context(text="a"),
            trie_id="t",
            stop_token_ids=[7],
            max_new_tokens=9,
            n=16,
        )
        tokens: dict[int, list[int]] = {}
        async for step in served.client.generate(request):
            for news in step.news:
                tokens.setdefault(news.sample, []).extend(news.token_ids)
        assert all(each in ([1, 2], [1, 7], [1, EOS_ID]) for each in tokens.values())
        request.stop_token_ids[:] = [2]
        with pytest.raises(ClientError, match="stop_token_ids"):
            [step async for step in served.client.generate(request)]


async def test_a_client_tells_a_server_the_tries_that_it_has_forgotten() -> None:
    async with (
        serving(byte_engine()) as served,
        Client(served.target, reregister=True) as client,
    ):
        by_ids = await client.tries.upload(ids([5, 6]), trie_id="ids")
        by_text = await client.tries.upload(["xyz"])
        await served.client.tries.delete("ids")
        await served.client.tries.delete(by_text.trie_id)
        assert await said(client, by_text.trie_id) == "xyz"
        assert await said(client, by_ids.trie_id)
        with pytest.raises(ClientError, match="not there"):
            await said(client, "nobody's")
        await client.tries.delete("ids")
        with pytest.raises(ClientError, match="not there"):
            await said(client, "ids")


async def test_a_tenant_has_its_own_tries_within_its_quota() -> None:
    tenants = {
        "a": TenantConfig(key_sha256=(hashlib.sha256(b"ka").hexdigest(),), max_trie_bytes=2_000),
        "b": TenantConfig(key_sha256=(hashlib.sha256(b"kb").hexdigest(),)),
    }
    async with (
        serving(
            byte_engine(), auth=AuthConfig(mode="keys"), tenants=tenants, access=Access(key="ka")
        ) as served,
        Client(served.target, access=Access(key="kb")) as other,
    ):
        await served.client.tries.upload(["ab"], trie_id="t")
        assert await other.tries.list() == ()
        with pytest.raises(ClientError, match="not there"):
            await said(other, "t")
        texts = [f"{number:03}" for number in range(999)]
        with pytest.raises(ClientError, match="tenant a") as refused:
            await served.client.tries.upload(texts)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await other.tries.upload(texts)).sequences == 999


async def test_an_upload_that_waits_takes_no_thread_of_the_loop() -> None:
    """A server goes on with other calls while a set is built."""
    rng = np.random.default_rng()
    sequences = ids(*rng.integers(0, 256, (40_000, 5)).tolist())
    async with serving(byte_engine(), limits=Limits(max_token_sequences=40_000)) as served:
        upload = asyncio.create_task(served.client.tries.upload(sequences))
        while not upload.done():
            assert await served.client.limits()
        assert upload.result().sequences == len({tuple(each.tolist()) for each in sequences})
