"""Registered prefixes and tenants with known right answers, on real servers and workers."""

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.e2e.served import until_idle, until_running

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import Access, Client, ClientError, Scores

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
Register = prefixes_pb2.RegisterRequest
LIKELIHOOD = inference_pb2.LogLikelihood(token_logprobs=True)
TOLERANCE = 1e-4  # of a log-probability
PAGE = 16
KV_PAGES = 120
STEP_TOKENS = 64

TENANTS = {"search": "", "mail": "", "web": "", "ads": "web", "news": "web", "ab": "", "a": "bc"}


@pytest.fixture(scope="module")
def dummy_options(tiny_model: Path) -> list[object]:
    words: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
    return [*words, "--kv-pages", KV_PAGES, "--max-step-tokens", STEP_TOKENS]


@pytest.fixture(scope="module")
def ports(start_server: StartServer, dummy_options: list[object]) -> dict[str, int]:
    return start_server(*dummy_options)[1]


@pytest.fixture
async def client(ports: dict[str, int]) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as client:
        yield client
        for prefix in await client.list_prefixes():
            await client.release_prefix(prefix.prefix_id)
        await until_idle(client)


def text_of(rng: np.random.Generator, tokens: int, *, first: str = "") -> str:
    """The tokenizer has one token a character. `first`, in capitals, begins no other text."""
    drawn = rng.integers(ord("a"), ord("z") + 1, tokens - len(first))
    return first + "".join(map(chr, drawn))


async def score_prefix(client: Client, prefix_id: str, items: list[str]) -> Scores:
    return await client.score(
        items, LIKELIHOOD, contexts=[inference_pb2.Context(prefix_id=prefix_id)]
    )


async def push_out(client: Client, rng: np.random.Generator) -> None:
    """Plain traffic that needs more pages than there are."""
    for _ in range(3):
        context = text_of(rng, KV_PAGES // 2 * PAGE)
        scores = await client.score(["x"], LIKELIHOOD, query=context)
        assert np.isfinite(scores.scores).all()


async def test_b47_a_pin_lasts_until_its_last_owner_lets_go(
    client: Client, rng: np.random.Generator
) -> None:
    text = text_of(rng, 200, first="T")
    asked = Register(text=text, prefix_id="twice", pin=True)
    for _ in range(2):
        await client.register(asked)
    first = await score_prefix(client, "twice", ["abc"])
    await client.release_prefix("twice")
    await push_out(client, rng)
    assert (await client.get_prefix("twice")).resident_tokens == 200
    again = await score_prefix(client, "twice", ["abc"])
    assert again.usage.cached_tokens == 199
    np.testing.assert_allclose(again.token_logprobs[0], first.token_logprobs[0], atol=TOLERANCE)
    await client.release_prefix("twice")
    await push_out(client, rng)
    with pytest.raises(ClientError) as unknown:
        await score_prefix(client, "twice", ["abc"])
    assert unknown.value.code is grpc.StatusCode.NOT_FOUND
    cold = await client.score(["abc"], LIKELIHOOD, query=text)
    assert cold.usage.cached_tokens == 0
    np.testing.assert_allclose(cold.token_logprobs[0], first.token_logprobs[0], atol=TOLERANCE)
    other = await client.score(["abc"], LIKELIHOOD, query=text_of(rng, 200))
    assert np.abs(other.token_logprobs[0] - cold.token_logprobs[0]).max() > 10 * TOLERANCE


async def test_b47_when_the_room_for_pins_is_used_up_plain_calls_are_still_answered(
    client: Client, rng: np.random.Generator
) -> None:
    with pytest.raises(ClientError) as refusal:
        for number in range(KV_PAGES):
            await client.register(Register(text=text_of(rng, 160), prefix_id=f"{number}", pin=True))
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    pinned = await client.list_prefixes()
    assert [prefix.resident_tokens for prefix in pinned] == [160] * (KV_PAGES // 2 // 10)
    await push_out(client, rng)
    assert [prefix.resident_tokens for prefix in await client.list_prefixes()] == [160] * len(
        pinned
    )


async def test_b47_a_prefix_released_while_it_is_scored_is_read_to_the_end(
    client: Client, rng: np.random.Generator
) -> None:
    items = [text_of(rng, 30) for _ in range(120)]
    await client.register(Register(text=text_of(rng, 300), prefix_id="going", pin=True))
    before = await score_prefix(client, "going", items)
    running = asyncio.create_task(score_prefix(client, "going", items))
    await until_running(client, 1)
    await client.release_prefix("going")
    assert not running.done()
    await push_out(client, rng)
    after = await running
    np.testing.assert_allclose(after.scores, before.scores, rtol=0, atol=30 * TOLERANCE)
    with pytest.raises(ClientError, match="'going' is not registered"):
        await score_prefix(client, "going", items)


async def test_b47_an_expired_prefix_is_unknown_and_never_an_empty_one(client: Client) -> None:
    await client.register(Register(text="soon gone", prefix_id="short", ttl_seconds=0.3, pin=True))
    await asyncio.sleep(0.4)
    for prefix_id in ("short", "never"):
        with pytest.raises(ClientError) as unknown:
            await score_prefix(client, prefix_id, ["abc"])
        assert unknown.value.code is grpc.StatusCode.NOT_FOUND


@pytest.fixture(scope="module")
def tenant_ports(
    start_server: StartServer, dummy_options: list[object], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, int]:
    """A server of tenants, each with its name as its key."""
    lines = ["[auth]", 'mode = "keys"']
    for name, group in TENANTS.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        lines += [f"[tenants.{name}]", f'key_sha256 = ["{digest}"]', f'group = "{group}"']
    config = tmp_path_factory.mktemp("tenants") / "stemserve.toml"
    config.write_text("\n".join(lines))
    return start_server("--config", config, *dummy_options)[1]


async def test_b48_a_cached_prompt_is_found_again_by_its_own_tenant_only(
    tenant_ports: dict[str, int], rng: np.random.Generator
) -> None:
    """Not by the others of a group, nor where names of tenants and groups join to the same."""
    prompt = text_of(rng, 50, first="P")
    cached: list[tuple[str, int]] = []
    scores: list[float] = []
    for name in ("search", "search", "mail", "web", "ads", "news", "ads", "ab", "a", "search"):
        async with as_tenant(tenant_ports, name) as client:
            answer = await client.score(["ab"], LIKELIHOOD, query=prompt)
        cached.append((name, answer.usage.cached_tokens))
        scores.append(float(answer.scores[0]))
    assert cached == [
        ("search", 0),
        ("search", 49),
        ("mail", 0),
        ("web", 0),
        ("ads", 0),
        ("news", 0),
        ("ads", 49),
        ("ab", 0),
        ("a", 0),
        ("search", 49),
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=0, atol=2 * TOLERANCE)


async def test_b48_a_group_finds_the_full_pages_of_a_shared_prefix_and_each_tenant_its_own_rest(
    tenant_ports: dict[str, int], rng: np.random.Generator
) -> None:
    """The prefix has 3 full pages and 2 tokens, the context 30 more."""
    law, rest = text_of(rng, 50, first="L"), text_of(rng, 30)
    context = inference_pb2.Context(prefix_id="law", text=rest)
    async with as_tenant(tenant_ports, "ads") as client:
        await client.register(Register(text=law, prefix_id="law", shared=True, warm=True))
    cached: list[tuple[str, int]] = []
    scores: list[float] = []
    for name in ("news", "news", "ads", "ads"):
        async with as_tenant(tenant_ports, name) as client:
            answer = await client.score(["ab"], LIKELIHOOD, contexts=[context])
        cached.append((name, answer.usage.cached_tokens))
        scores.append(float(answer.scores[0]))
    assert cached == [("news", 48), ("news", 79), ("ads", 50), ("ads", 79)]
    async with as_tenant(tenant_ports, "search") as client:
        answer = await client.score(["ab"], LIKELIHOOD, query=law + rest)
        assert answer.usage.cached_tokens == 0
        scores.append(float(answer.scores[0]))
        with pytest.raises(ClientError, match="not registered"):
            await score_prefix(client, "law", ["ab"])
    np.testing.assert_allclose(scores, scores[0], rtol=0, atol=2 * TOLERANCE)


async def test_b48_a_prefix_of_one_tenant_is_not_found_by_another(
    tenant_ports: dict[str, int],
) -> None:
    """Not even by one of its sharing group."""
    target = f"127.0.0.1:{tenant_ports['rpc']}"
    async with Client(target, access=Access(key="ads")) as owner:
        await owner.register(Register(text="hello", prefix_id="mine", warm=True))
        assert (await score_prefix(owner, "mine", ["ab"])).usage.cached_tokens == 4
        for name in ("news", "search"):
            async with Client(target, access=Access(key=name)) as other:
                with pytest.raises(ClientError) as unknown:
                    await score_prefix(other, "mine", ["ab"])
                assert unknown.value.code is grpc.StatusCode.NOT_FOUND


def as_tenant(ports: dict[str, int], name: str) -> Client:
    return Client(f"127.0.0.1:{ports['rpc']}", access=Access(key=name))
