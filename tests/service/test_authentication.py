"""Nothing but health is answered without a credential, and tenants see nothing of each other."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, Served, serving

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc, info_pb2, prefixes_pb2
from stemserve.service.client import Access, Client, ClientError
from stemserve.service.config.access import (
    AuthConfig,
    TenantConfig,
)
from stemserve.service.limits import Limits
from stemserve.service.request import NO_TRUNK, stored_sequences
from stemserve.service.serving.reflection import V1, V1ALPHA

KEYS = {"search": "key-of-search", "mail": "key-of-mail", "next": "key-of-next"}
TENANTS = {
    name: TenantConfig(
        key_sha256=(hashlib.sha256(key.encode()).hexdigest(),),
        group="web" if name != "mail" else "",
    )
    for name, key in KEYS.items()
}
BY_KEY = AuthConfig(mode="keys")
MODE = inference_pb2.LogLikelihood()
Register = prefixes_pb2.RegisterRequest


def byte_engine() -> BigramEngine:
    return BigramEngine(random_bigrams(BYTE_VOCABULARY))


def methods() -> Iterator[tuple[str, bool]]:
    """Every method of the public services and of reflection, and whether it takes a stream."""
    for file in (inference_pb2, prefixes_pb2, info_pb2):
        services: dict[str, descriptor.ServiceDescriptor] = file.DESCRIPTOR.services_by_name
        for service in services.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", bool(method.client_streaming)
    for name in (V1, V1ALPHA):
        yield f"/{name}/ServerReflectionInfo", True


async def code_of(channel: Any, method: str, *, streams: bool) -> grpc.StatusCode:
    """The status of a call with an empty request."""
    try:
        if streams:
            call = channel.stream_stream(method)(iter([b""]))
        else:
            call = channel.unary_stream(method)(b"")
        async for _ in call:
            break
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("key", [None, "wrong", "", "key-of-search "[:-2]])
async def test_every_method_refuses_a_call_without_a_known_key(key: str | None) -> None:
    access = Access(key=key)
    async with serving(byte_engine(), auth=BY_KEY, tenants=TENANTS, access=access) as served:
        for method, streams in methods():
            code = await code_of(served.channel, method, streams=streams)
            assert code is grpc.StatusCode.UNAUTHENTICATED, method
        reason = "no_credential" if key is None else "unknown_tenant"
        count = served.metric("auth_failures_total", reason=reason)
        assert count == len(list(methods()))


async def test_with_a_key_no_method_is_unauthenticated() -> None:
    access = Access(key=KEYS["search"])
    async with serving(byte_engine(), auth=BY_KEY, tenants=TENANTS, access=access) as served:
        for method, streams in methods():
            code = await code_of(served.channel, method, streams=streams)
            assert code is not grpc.StatusCode.UNAUTHENTICATED, method
            assert code is not grpc.StatusCode.UNKNOWN, method


async def test_health_needs_no_credential() -> None:
    async with serving(byte_engine(), auth=BY_KEY, tenants=TENANTS) as served:
        stub: Any = health_pb2_grpc.HealthStub(served.channel)
        assert await stub.Check(health_pb2.HealthCheckRequest())


async def test_a_refusal_says_what_to_send_and_not_what_was_close() -> None:
    async with serving(byte_engine(), auth=BY_KEY, tenants=TENANTS) as served:
        with pytest.raises(ClientError, match="authorization: Bearer") as refused:
            await served.client.score(["a"], MODE, query="q")
        assert refused.value.reason == "UNAUTHENTICATED"


async def as_tenant(served: Served, name: str) -> Client:
    return Client(served.target, access=Access(key=KEYS[name]))


async def test_streams_that_a_tenant_leaves_open_leave_room_for_the_others() -> None:
    limits = Limits(max_concurrent_calls=6)
    tenants = {name: TENANTS[name] for name in ("search", "mail")}
    async with serving(byte_engine(), limits=limits, auth=BY_KEY, tenants=tenants) as served:
        stub: Any = inference_pb2_grpc.InferenceStub(served.channel)
        score = inference_pb2.ScoreRequest(items=["a"], query="q", log_likelihood=MODE)
        request = inference_pb2.ScoreStreamRequest(request=score)
        streams: list[Any] = []
        for _ in range(5):  # one of its own, and the four that are whoever's
            stream = stub.ScoreStream(metadata=(("authorization", f"Bearer {KEYS['search']}"),))
            await stream.write(request)
            assert await stream.read()
            streams.append(stream)
        search, mail = await as_tenant(served, "search"), await as_tenant(served, "mail")
        async with search, mail:
            with pytest.raises(ClientError, match="calls are open"):
                await search.score(["a"], MODE, query="q")
            await mail.score(["a"], MODE, query="q")
        for stream in streams:
            stream.cancel()


async def test_a_tenant_may_not_put_itself_before_all_others() -> None:
    tenants = {**TENANTS, "mail": replace(TENANTS["mail"], max_priority=5)}
    async with serving(byte_engine(), auth=BY_KEY, tenants=tenants) as served:
        for name, highest in (("search", 0), ("mail", 5)):
            async with await as_tenant(served, name) as client:
                for priority in (highest, -3):
                    options = inference_pb2.ScoreRequest(priority=priority)
                    await client.score(["a"], MODE, query="q", options=options)
                options = inference_pb2.ScoreRequest(priority=highest + 1)
                with pytest.raises(ClientError) as refused:
                    await client.score(["a"], MODE, query="q", options=options)
                assert refused.value.violations.keys() == {"priority"}
                request = inference_pb2.GenerateRequest(
                    prompt=inference_pb2.Context(text="q"), priority=highest + 1, max_new_tokens=1
                )
                with pytest.raises(ClientError, match="max_priority"):
                    async for _ in client.generate(request):
                        pass


async def test_b48_an_id_of_another_tenant_looks_like_one_that_nobody_registered() -> None:
    async with serving(byte_engine(), auth=BY_KEY, tenants=TENANTS) as served:
        search, mail = await as_tenant(served, "search"), await as_tenant(served, "mail")
        async with search, mail:
            request = Register(text="a shared text", prefix_id="mine")
            prefix = await search.register(request)
            assert [p.prefix_id for p in await search.list_prefixes()] == ["mine"]
            assert await mail.list_prefixes() == ()
            for use in (mail.get_prefix, mail.release_prefix, mail.renew_prefix):
                messages: list[str] = []
                for prefix_id in (prefix.prefix_id, "never"):
                    with pytest.raises(ClientError) as refused:
                        await use(prefix_id)
                    assert refused.value.code is grpc.StatusCode.NOT_FOUND
                    messages.append(str(refused.value).replace(prefix_id, ""))
                assert messages[0] == messages[1]
            context = inference_pb2.Context(prefix_id="mine")
            with pytest.raises(ClientError) as refused:
                await mail.score(["a"], MODE, contexts=[context])
            assert refused.value.code is grpc.StatusCode.NOT_FOUND
            assert await search.score(["a"], MODE, contexts=[context])


async def test_b48_tenants_of_one_group_too_share_no_cached_page_by_themselves() -> None:
    engine = byte_engine()
    async with serving(engine, auth=BY_KEY, tenants=TENANTS) as served:
        for name in KEYS:
            async with await as_tenant(served, name) as client:
                await client.score(["a"], MODE, query="the same")
    realms = [realm for job in engine.jobs for _, realm in stored_sequences(job)]
    assert all(len(realm.salt) == 32 and realm.trunk == NO_TRUNK for realm in realms)
    assert len({realm.salt for realm in realms}) == len(KEYS)


async def test_b48_a_shared_prefix_is_the_groups_and_what_continues_it_each_tenants() -> None:
    engine = byte_engine()
    context = inference_pb2.Context(prefix_id="law", text=" and more")
    async with serving(engine, auth=BY_KEY, tenants=TENANTS) as served:
        search, other = await as_tenant(served, "search"), await as_tenant(served, "next")
        async with search, other:
            request = Register(text="the law", prefix_id="law", shared=True)
            assert (await search.register(request)).shared
            engine.jobs.clear()
            for client in (search, other):
                await client.score(["a"], MODE, contexts=[context])
                generate = inference_pb2.GenerateRequest(prompt=context, max_new_tokens=1)
                assert [step async for step in client.generate(generate)]
    realms = [realm for job in engine.jobs for _, realm in stored_sequences(job)]
    (trunk,) = {realm.trunk for realm in realms}
    assert trunk.tokens == len("the law") and len(trunk.salt) == 32
    salts = [realm.salt for realm in realms]
    assert salts[:2] == [salts[0]] * 2 and salts[2:] == [salts[2]] * 2
    assert len({trunk.salt, salts[0], salts[2]}) == 3


async def test_a_shared_prefix_is_seen_by_its_group_and_kept_by_who_registered_it() -> None:
    async with serving(byte_engine(), auth=BY_KEY, tenants=TENANTS) as served:
        search, other = await as_tenant(served, "search"), await as_tenant(served, "next")
        mail = await as_tenant(served, "mail")
        async with search, other, mail:
            await search.register(Register(text="the law", prefix_id="law", shared=True))
            assert (await other.get_prefix("law")).shared
            assert [prefix.prefix_id for prefix in await other.list_prefixes()] == ["law"]
            for use in (other.release_prefix, other.renew_prefix):
                with pytest.raises(ClientError, match="only they may renew") as refused:
                    await use("law")
                assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
            for look in (mail.get_prefix, mail.release_prefix, mail.renew_prefix):
                with pytest.raises(ClientError) as refused:
                    await look("law")
                assert refused.value.code is grpc.StatusCode.NOT_FOUND
            await other.register(Register(text="the law", prefix_id="law", shared=True))
            await search.release_prefix("law")
            assert await search.get_prefix("law")
            await other.release_prefix("law")
            with pytest.raises(ClientError):
                await search.get_prefix("law")


async def test_only_what_continues_shared_content_can_be_shared() -> None:
    async with serving(byte_engine(), auth=BY_KEY, tenants=TENANTS) as served:
        search, mail = await as_tenant(served, "search"), await as_tenant(served, "mail")
        async with search, mail:
            await search.register(Register(text="secret", prefix_id="own"))
            await search.register(Register(text="law", prefix_id="law", shared=True))
            chapter = Register(text="!", parent_prefix_id="law", prefix_id="chapter", shared=True)
            assert (await search.register(chapter)).shared
            for client, request in (
                (search, Register(text="!", parent_prefix_id="own", shared=True)),
                (mail, Register(text="law", shared=True)),
            ):
                with pytest.raises(ClientError) as refused:
                    await client.register(request)
                assert refused.value.violations.keys() == {"shared"}
            with pytest.raises(ClientError) as refused:
                await search.register(Register(text="secret", prefix_id="own", shared=True))
            assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS


async def test_requests_are_counted_by_tenant() -> None:
    access = Access(key=KEYS["mail"])
    async with serving(byte_engine(), auth=BY_KEY, tenants=TENANTS, access=access) as served:
        await served.client.score(["a"], MODE, query="q")
        assert served.metric("requests_total", method="score", code="OK", tenant="mail") == 1
        assert served.metric("requests_total", method="score", code="OK", tenant="search") == 0
