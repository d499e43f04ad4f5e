"""What the client library tells a router, and how it helps a server that lacks a prefix."""

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine
from tests.service.serving import serving

from stemserve.proto.v1 import inference_pb2, info_pb2, prefixes_pb2
from stemserve.service.client import Client, ClientError
from stemserve.service.client.prefixes import KnownPrefixes, with_id
from stemserve.service.client.routing import prefix_ids, route
from stemserve.service.metadata_keys import ROUTING_KEY

Score = inference_pb2.ScoreRequest
Context = inference_pb2.Context
Register = prefixes_pb2.RegisterRequest
ITEMS = [np.array([0, 1], dtype=np.int32)]
MODE = inference_pb2.LogLikelihood()


def generate(text: str = "", prefix_id: str = "") -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=Context(text=text, prefix_id=prefix_id))


def test_all_calls_with_a_registered_prefix_go_where_it_was_registered() -> None:
    by_id = ((ROUTING_KEY, "manual"),)
    context = Context(prefix_id="manual", text="and more")
    for request in (
        Register(text="text", prefix_id="manual"),
        Register(text="more", parent_prefix_id="manual"),
        Register(text="more", prefix_id="manual.chapter"),
        prefixes_pb2.GetRequest(prefix_id="manual"),
        prefixes_pb2.RenewRequest(prefix_id="manual"),
        prefixes_pb2.ReleaseRequest(prefix_id="manual"),
        Score(contexts=[context, Context(text="other")]),
        Score(contexts=[Context(prefix_id="manual.chapter")]),
        info_pb2.ExplainRequest(score=Score(contexts=[context])),
        info_pb2.ExplainRequest(generate=generate(prefix_id="manual")),
        generate("x", "manual"),
    ):
        assert route(request) == by_id, request


def test_without_an_id_the_shared_text_is_the_key() -> None:
    one = route(Score(query="q", items=["a"]))
    assert one == route(Score(query="q", items=["b", "c"]))
    assert one == route(Score(contexts=[Context(text="q")], items=["d"]))
    assert one != route(Score(query="r"))
    assert route(generate("a" * 1_024 + "b")) == route(generate("a" * 1_024 + "c"))
    assert route(generate("a" * 1_023 + "b")) != route(generate("a" * 1_023 + "c"))
    system = inference_pb2.ChatMessage(role="system", content="Be brief. " * 200)
    chats = [
        inference_pb2.GenerateRequest(
            chat=inference_pb2.Chat(messages=[first, inference_pb2.ChatMessage(content=text)])
        )
        for first, text in ((system, "a"), (system, "b"), (inference_pb2.ChatMessage(), "a"))
    ]
    assert route(chats[0]) == route(chats[1]) != route(chats[2])
    tokens = [Score(contexts=[Context(tokens=bytes([n, 0, 0, 0]))]) for n in (1, 1, 2)]
    assert route(tokens[0]) == route(tokens[1]) != route(tokens[2])


def test_no_key_where_nothing_is_shared_and_ascii_where_an_id_is_not() -> None:
    assert route(Score(items=["a"])) == route(prefixes_pb2.ListRequest()) == ()
    ((_, key),) = route(Score(contexts=[Context(prefix_id="Übersicht\n")]))
    assert key.isascii() and key.isalnum()
    assert route(prefixes_pb2.GetRequest(prefix_id=".x")) != ()


def test_ids_made_by_the_client_name_content_and_tree() -> None:
    one = with_id(Register(text="a"))
    assert one.prefix_id == with_id(Register(text="a", warm=True, ttl_seconds=5)).prefix_id
    others = [Register(text="b"), Register(tokens=b"a"), Register(text="a", shared=True)]
    assert len({one.prefix_id, *(with_id(other).prefix_id for other in others)}) == 4
    child = with_id(Register(text="a", parent_prefix_id=one.prefix_id))
    grandchild = with_id(Register(text="a", parent_prefix_id=child.prefix_id))
    assert len({one.prefix_id, child.prefix_id, grandchild.prefix_id}) == 3
    assert route(one) == route(child) == route(grandchild)
    assert with_id(Register(text="a", prefix_id="mine")).prefix_id == "mine"
    assert len(with_id(Register(text="a", parent_prefix_id="p" * 256)).prefix_id) <= 256


def test_parents_come_before_their_children() -> None:
    known = KnownPrefixes()
    for name, parent in (("a", ""), ("b", "a"), ("c", "b"), ("d", "gone")):
        known.remember(Register(prefix_id=name, parent_prefix_id=parent))
    assert [r.prefix_id for r in known.with_parents(["c", "b", "d", "e"])] == ["a", "b", "c", "d"]
    known.forget("b")
    assert [r.prefix_id for r in known.with_parents(["c"])] == ["c"]
    request = Score(contexts=[Context(prefix_id=name) for name in ("x", "", "y", "x")])
    assert prefix_ids(request) == ("x", "y")


async def test_a_server_that_lost_a_prefix_is_told_it_again() -> None:
    """Releasing it behind the client's back stands for a server that does not know it."""
    async with serving(BigramEngine()) as served, Client(served.target, reregister=True) as client:
        parent = await client.register(Register(tokens=np.array([0, 1], "<u4").tobytes()))
        child = await client.register(
            Register(tokens=np.array([2], "<u4").tobytes(), parent_prefix_id=parent.prefix_id)
        )
        contexts = [Context(prefix_id=child.prefix_id)]
        before = await client.score_tokens(ITEMS, MODE, contexts=contexts)
        for lost in ([child], [parent, child]):
            for prefix in lost:
                await served.client.release_prefix(prefix.prefix_id)
            with pytest.raises(ClientError) as failure:
                await served.client.score_tokens(ITEMS, MODE, contexts=contexts)
            assert failure.value.code is grpc.StatusCode.NOT_FOUND
            after = await client.score_tokens(ITEMS, MODE, contexts=contexts)
            assert after.scores.tolist() == before.scores.tolist()
        for prefix in (child, parent):
            await served.client.release_prefix(prefix.prefix_id)
        request = inference_pb2.GenerateRequest(prompt=contexts[0], max_new_tokens=2)
        steps = [step async for step in client.generate(request)]
        assert sum(len(news.token_ids) for step in steps for news in step.news) == 2
        await served.client.release_prefix(child.prefix_id)
        assert (await client.get_prefix(child.prefix_id)).token_count == 3
        await served.client.release_prefix(child.prefix_id)
        await client.release_prefix(child.prefix_id)  # it is gone already, as asked
        with pytest.raises(ClientError):
            await client.get_prefix(child.prefix_id)


async def test_a_prefix_that_the_client_did_not_register_stays_unknown() -> None:
    async with serving(BigramEngine()) as served, Client(served.target, reregister=True) as client:
        with pytest.raises(ClientError) as failure:
            await client.score_tokens(ITEMS, MODE, contexts=[Context(prefix_id="nobodys")])
        assert failure.value.code is grpc.StatusCode.NOT_FOUND
