"""Constraints are compiled beside the loop, in bounded time, and kept."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from tests.service.serving import BYTE_VOCABULARY, EOS_ID, byte_tokenizer, fixed_tokens
from tests.service.token_constraints import OneOf

from stemserve.service.constraints import compiler as compiler_module
from stemserve.service.constraints.compile_queue import MOST_WAITING, CompileQueue
from stemserve.service.constraints.compiler import ConstraintCompiler
from stemserve.service.constraints.constraint import ConstraintFault
from stemserve.service.constraints.grammar import Source, Vocabulary
from stemserve.service.constraints.kept import KEPT, KEPT_BYTES
from stemserve.service.errors import InvalidRequest, QueueFull
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.text.tokenizer import Tokenizer

TENANT = "some"
NESTED = 3000
BOMBS = {
    "repeated repetition": Source("regex", "((((a{1,1000}){1,1000}){1,1000}){1,1000}b)"),
    "wide repetition": Source("regex", r"(\w{1,200}\W{1,200}){1,200}"),
    "nested groups": Source("regex", "(" * NESTED + "a" + ")" * NESTED),
    "nested arrays": Source("json_schema", '{"items":' * NESTED + "{}" + "}" * NESTED),
    "endless reference": Source("json_schema", '{"$ref": "#"}'),
    "products": Source(
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(40)]}),
    ),
    "doubling rules": Source(
        "grammar",
        "start: a0 a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"',
    ),
    "doubling terminals": Source(
        "grammar",
        "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "x"',
    ),
    "left recursion": Source("grammar", "start: start"),
    "nested brackets": Source("grammar", "start: " + "(" * NESTED + '"a"' + ")" * NESTED),
}


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def make_compiler(
    executor: ThreadPoolExecutor,
    *,
    tokenizer: Tokenizer | None = None,
    registry: CollectorRegistry | None = None,
    max_compile_ms: int = 5_000,
    weights: dict[str, float] | None = None,
) -> ConstraintCompiler:
    return ConstraintCompiler(
        tokenizer or byte_tokenizer(),
        CompileQueue(executor, weights=weights),
        Metrics(registry or CollectorRegistry()),
        vocab_size=BYTE_VOCABULARY + 14,
        max_compile_ms=max_compile_ms,
    )


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_or_harmless_and_the_loop_goes_on(
    executor: ThreadPoolExecutor, name: str
) -> None:
    compiler, turns = make_compiler(executor), 0
    task = asyncio.create_task(compiler.compiled(TENANT, BOMBS[name]))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 1
    try:
        constraint = task.result()
    except InvalidRequest as refusal:
        assert refusal.field == BOMBS[name].kind
        return
    state = constraint.start()
    try:
        for _ in range(50):
            state.advance(int(state.allowed().ids[-1]))
    except ConstraintFault:
        pass


async def test_a_compilation_that_takes_too_long_is_refused_and_kept_for_the_next_call(
    executor: ThreadPoolExecutor,
) -> None:
    compiler, go_on = make_compiler(executor, max_compile_ms=50), threading.Event()
    busy = executor.submit(go_on.wait)
    with pytest.raises(InvalidRequest, match=r"max_compile_ms \(50 ms\)"):
        await compiler.compiled(TENANT, Source("regex", "a"))
    go_on.set()
    assert busy.result()
    await asyncio.get_running_loop().run_in_executor(executor, lambda: None)
    assert await compiler.compiled(TENANT, Source("regex", "a"))


async def test_equal_constraints_are_compiled_once_and_the_oldest_go(
    executor: ThreadPoolExecutor,
) -> None:
    registry = CollectorRegistry()
    compiler = make_compiler(executor, registry=registry)
    sources = [Source("regex", f"a{{{count}}}") for count in range(1, KEPT + 2)]
    twice = await asyncio.gather(
        compiler.compiled(TENANT, sources[0]), compiler.compiled(TENANT, sources[0])
    )
    assert twice[0] is twice[1]
    for source in sources[1:]:
        await compiler.compiled(TENANT, source)
    assert await compiler.compiled(TENANT, sources[1])
    assert await compiler.compiled(TENANT, sources[0]) is not twice[0]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"stemserve_{name}", {"kind": "regex", **labels})

    assert value("constraints_total", cache="hit") == 1
    assert value("constraint_compile_seconds_count", outcome="compiled") == KEPT + 2


async def test_more_compilations_than_may_wait_are_refused(executor: ThreadPoolExecutor) -> None:
    compiler, go_on = make_compiler(executor), threading.Event()
    executor.submit(go_on.wait)
    waiting = [
        asyncio.create_task(compiler.compiled(TENANT, Source("regex", f"a{{{count}}}")))
        for count in range(1, MOST_WAITING + 1)
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await compiler.compiled(TENANT, Source("regex", "b"))
    go_on.set()
    assert all(await asyncio.gather(*waiting))


async def test_a_model_without_a_tokenizer_or_an_end_has_no_constraints_on_text(
    executor: ThreadPoolExecutor,
) -> None:
    for tokenizer in (fixed_tokens(b"a", b"b"), fixed_tokens(b"a", b"", eos_id=1)):
        with pytest.raises(InvalidRequest, match="this model has no"):
            await make_compiler(executor, tokenizer=tokenizer).compiled(
                TENANT, Source("regex", "a")
            )


async def test_the_end_is_allowed_where_the_output_is_complete_only(
    executor: ThreadPoolExecutor,
) -> None:
    constraint = await make_compiler(executor).compiled(TENANT, Source("regex", "ab?"))
    tokens = byte_tokenizer().token_bytes
    state = constraint.start()
    seen: list[list[int]] = []
    for text in (b"a", b"b"):
        seen.append(state.allowed().ids.tolist())
        state.advance(tokens.index(text))
    assert seen == [[tokens.index(b"a")], sorted([tokens.index(b"b"), EOS_ID])]
    assert state.is_closed and state.is_complete
    with pytest.raises(ConstraintFault):
        constraint.start().advance(tokens.index(b"b"))


async def test_large_constraints_make_room_for_one_another(executor: ThreadPoolExecutor) -> None:
    compiler = make_compiler(executor)
    sources = [Source("token_sequences", name) for name in "abc"]
    made = [OneOf([[1]], BYTE_VOCABULARY, EOS_ID, num_bytes=KEPT_BYTES // 2) for _ in sources]

    async def compiled(number: int) -> object:
        return await compiler.compiled(TENANT, sources[number], lambda: replace(made[number]))

    first = [await compiled(number) for number in range(3)]
    assert await compiled(2) is first[2]
    assert await compiled(1) is first[1]
    assert await compiled(0) is not first[0]


async def test_what_a_thread_works_on_is_held_until_it_ends_though_the_caller_has_left(
    executor: ThreadPoolExecutor,
) -> None:
    compiler, go_on = make_compiler(executor), threading.Event()
    started, built = asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def build() -> None:
        loop.call_soon_threadsafe(started.set)
        go_on.wait()
        built.append("running")

    running = asyncio.create_task(compiler.made(TENANT, "trie_id", build))
    waiting = asyncio.create_task(compiler.made(TENANT, "trie_id", lambda: built.append("waiting")))
    await started.wait()
    running.cancel()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(10):
        await asyncio.sleep(0)
    is_held = not running.done()
    go_on.set()
    assert is_held
    with pytest.raises(asyncio.CancelledError):
        await running
    assert built == ["running"]


async def test_those_whose_callers_have_left_count_until_they_end(
    executor: ThreadPoolExecutor,
) -> None:
    compiler, go_on, started = make_compiler(executor), threading.Event(), threading.Event()

    def build() -> None:
        started.set()
        go_on.wait()

    left = asyncio.create_task(compiler.made(TENANT, "trie_id", build))
    assert await asyncio.to_thread(started.wait, 60)
    left.cancel()
    await asyncio.sleep(0)
    waiting = [
        asyncio.create_task(compiler.made(TENANT, "trie_id", lambda: None))
        for _ in range(MOST_WAITING - 1)
    ]
    await asyncio.sleep(0)
    more = asyncio.create_task(compiler.made(TENANT, "trie_id", lambda: None))
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(QueueFull):
        await more
    await asyncio.gather(*waiting)
    with pytest.raises(asyncio.CancelledError):
        await left


async def test_what_one_tenant_has_compiled_another_compiles_anew(
    executor: ThreadPoolExecutor,
) -> None:
    """Otherwise the time of a call would say whether others have used the same constraint."""
    registry = CollectorRegistry()
    compiler, source = make_compiler(executor, registry=registry), Source("regex", "secret")
    of_a = await compiler.compiled("a", source)
    of_b = await compiler.compiled("b", source)
    assert of_a is not of_b
    assert await compiler.compiled("a", source) is of_a
    together = await asyncio.gather(
        *(compiler.compiled(tenant, Source("regex", "two")) for tenant in "ab")
    )
    assert together[0] is not together[1]
    labels = {"kind": "regex", "outcome": "compiled"}
    assert registry.get_sample_value("stemserve_constraint_compile_seconds_count", labels) == 4


async def test_a_tenant_with_many_constraints_throws_out_its_own(
    executor: ThreadPoolExecutor,
) -> None:
    compiler, source = make_compiler(executor), Source("regex", "a")
    of_b = await compiler.compiled("b", source)
    for count in range(1, KEPT + 2):
        await compiler.compiled("a", Source("regex", f"a{{{count}}}"))
    assert await compiler.compiled("b", source) is of_b


async def test_what_all_constraints_need_is_made_once_before_there_are_calls(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library lets no other thread run while it makes that."""
    made: list[Vocabulary] = []

    class Noted(Vocabulary):
        def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
            super().__init__(tokenizer, vocab_size)
            made.append(self)

    monkeypatch.setattr(compiler_module, "Vocabulary", Noted)
    compiler = make_compiler(executor)
    await compiler.prepare()
    assert len(made) == 1
    for text in ("a", "b"):
        await compiler.compiled(TENANT, Source("regex", text))
    assert len(made) == 1


async def test_a_model_that_can_have_no_constraints_on_text_starts_all_the_same(
    executor: ThreadPoolExecutor,
) -> None:
    compiler = make_compiler(executor, tokenizer=fixed_tokens(b"a", b"b"))
    await compiler.prepare()
    with pytest.raises(InvalidRequest, match="this model has no"):
        await compiler.compiled(TENANT, Source("regex", "a"))
