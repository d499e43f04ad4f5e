"""Pins follow their registrations; a new worker computes what should be warm."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, serving

from stemserve.proto.v1 import prefixes_pb2
from stemserve.service.calls.prefixes import prefix_keeper
from stemserve.service.client import ClientError
from stemserve.service.request import Int32, Realm, ScoreJob, ScoreResult

Register = prefixes_pb2.RegisterRequest


def byte_engine() -> BigramEngine:
    return BigramEngine(random_bigrams(BYTE_VOCABULARY))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_keeper, "PERIOD_S", 0.01)


async def test_a_pinned_prefix_is_computed_held_and_let_go() -> None:
    async with serving(byte_engine()) as served:
        prefix = await served.client.register(Register(text="abc", prefix_id="x", pin=True))
        assert prefix.pinned
        assert [len(tokens) for tokens in served.engine.pinned.values()] == [3]
        assert len(served.engine.jobs) == 1
        await served.client.register(Register(text="abc", prefix_id="x"))
        await served.client.release_prefix("x")
        assert served.engine.pinned
        await served.client.release_prefix("x")
        assert not served.engine.pinned


async def test_an_expired_pin_is_let_go_without_a_call() -> None:
    async with serving(byte_engine()) as served:
        await served.client.register(Register(text="abc", pin=True, ttl_seconds=0.2))
        assert served.engine.pinned
        await until(lambda: not served.engine.pinned)


async def test_a_new_worker_computes_what_should_be_warm() -> None:
    async with serving(byte_engine()) as served:
        await served.client.register(Register(text="warm", warm=True))
        await served.client.register(Register(text="pinned", pin=True))
        await served.client.register(Register(text="plain"))
        served.engine.jobs.clear()
        served.engine.pinned.clear()
        served.engine.generation += 1
        await until(lambda: len(served.engine.pinned) == 1)
        jobs = [job for job in served.engine.jobs if isinstance(job, ScoreJob)]
        assert sorted(len(job.contexts[0]) for job in jobs) == [4, 6]
        assert all(job.priority < 0 for job in jobs)


class HeldEngine(BigramEngine):
    """Scores nothing before it may go on."""

    def __init__(self) -> None:
        super().__init__(random_bigrams(BYTE_VOCABULARY))
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.holds = 0

    async def score(self, job: ScoreJob) -> ScoreResult:
        self.holds += not self.go_on.is_set()
        await self.go_on.wait()
        return await super().score(job)


async def test_a_prefix_that_is_released_while_a_new_worker_computes_it_is_not_pinned() -> None:
    engine = HeldEngine()
    async with serving(engine) as served:
        await served.client.register(Register(text="abc", prefix_id="gone", pin=True))
        await served.client.register(Register(text="abd", prefix_id="kept", pin=True))
        engine.pinned.clear()
        engine.go_on.clear()
        engine.generation += 1
        await until(lambda: engine.holds == 1)
        await served.client.release_prefix("gone")
        engine.go_on.set()
        await until(lambda: "kept" in "".join(engine.pinned))
        assert len(engine.pinned) == 1


async def test_a_prefix_that_is_released_while_it_is_registered_again_is_not_pinned() -> None:
    engine = HeldEngine()
    async with serving(engine) as served:
        engine.go_on.clear()
        registering = asyncio.create_task(
            served.client.register(Register(text="abc", prefix_id="x", pin=True))
        )
        await until(lambda: engine.holds == 1)
        await served.client.release_prefix("x")
        engine.go_on.set()
        with pytest.raises(ClientError, match="not registered"):
            await registering
        assert not engine.pinned


async def test_pins_expire_while_a_new_worker_is_too_busy_to_compute_prefixes() -> None:
    engine = HeldEngine()
    async with serving(engine) as served:
        await served.client.register(Register(text="abc", warm=True))
        engine.go_on.clear()
        engine.generation += 1
        await until(lambda: engine.holds == 1)
        engine.go_on.set()
        await served.client.register(Register(text="abd", pin=True, ttl_seconds=0.2))
        engine.go_on.clear()
        engine.generation += 1
        await until(lambda: engine.holds == 2)
        await until(lambda: not engine.pinned)
        engine.go_on.set()


async def test_a_prefix_that_is_evicted_as_fast_as_it_is_computed_is_not_pinned() -> None:
    async with serving(byte_engine()) as served:
        served.engine.evicted_tokens = 1
        with pytest.raises(ClientError, match="evicted as fast") as refusal:
            await served.client.register(Register(text="abc", pin=True))
        assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await served.client.list_prefixes() == ()
        await until(lambda: not served.engine.pinned)


class LatePins(BigramEngine):
    """Gives pins up when it may go on."""

    def __init__(self) -> None:
        super().__init__(random_bigrams(BYTE_VOCABULARY))
        self.go_on = asyncio.Event()
        self.asked = self.cancelled = 0

    async def unpin(self, key: str) -> None:
        self.asked += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await super().unpin(key)


async def test_a_pin_is_let_go_though_its_release_is_cancelled_meanwhile() -> None:
    engine = LatePins()
    async with serving(engine) as served:
        for prefix_id in ("a", "b"):
            await served.client.register(Register(text=prefix_id, prefix_id=prefix_id, pin=True))
        releasing = asyncio.create_task(served.client.release_prefix("a"))
        await until(lambda: engine.asked == 1)
        releasing.cancel()
        await until(lambda: engine.cancelled == 1)
        engine.go_on.set()
        await until(lambda: len(engine.pinned) == 1)


class SilentPins(BigramEngine):
    """Pins when it may go on, and says nothing."""

    def __init__(self) -> None:
        super().__init__(random_bigrams(BYTE_VOCABULARY))
        self.go_on = asyncio.Event()
        self.asked = 0

    async def pin(self, key: str, tokens: Int32, realm: Realm) -> int:
        self.asked += 1
        await self.go_on.wait()
        await super().pin(key, tokens, realm)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_a_pin_that_comes_after_its_release_is_let_go_though_its_call_is_cancelled() -> None:
    engine = SilentPins()
    async with serving(engine) as served:
        register = Register(text="abc", prefix_id="x", pin=True)
        registering = asyncio.create_task(served.client.register(register))
        await until(lambda: engine.asked == 1)
        await served.client.release_prefix("x")
        engine.go_on.set()
        await until(lambda: bool(engine.pinned))
        registering.cancel()
        await until(lambda: not engine.pinned)


class FaultyPins(BigramEngine):
    """Its first pin is never given up."""

    faults = 0

    async def unpin(self, key: str) -> None:
        if not self.faults:
            self.faults += 1
            raise RuntimeError("a fault")
        await super().unpin(key)


async def test_a_fault_with_one_pin_keeps_no_other() -> None:
    engine = FaultyPins(random_bigrams(BYTE_VOCABULARY))
    async with serving(engine) as served:
        for prefix_id in ("a", "b"):
            register = Register(text=prefix_id, prefix_id=prefix_id, pin=True, ttl_seconds=0.2)
            await served.client.register(register)
        await until(lambda: len(engine.pinned) == 1)
        assert engine.faults == 1
