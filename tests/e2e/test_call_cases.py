"""Calls that are left, late, large or counted, with known right answers, on real servers."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from tests.e2e.served import check_health, children, scrape, until_idle, until_running

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc
from stemserve.service.client import Client, ClientError

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
LIKELIHOOD = inference_pb2.LogLikelihood()
KV_PAGES = 200
STEP_TOKENS = 64
DECODE_STEPS = 'stemserve_step_seconds_count{phase="decode"}'
PREFILL_STEPS = 'stemserve_step_seconds_count{phase="prefill"}'
ENDLESS_CLIENT = """
import asyncio, sys
from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client

async def main():
    prompt = inference_pb2.Context(text="once")
    request = inference_pb2.GenerateRequest(prompt=prompt, max_new_tokens=3000, ignore_eos=True)
    async with Client(sys.argv[1]) as client:
        async for _ in client.generate(request):
            print("token", flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def served(start_server: StartServer, tiny_model: Path) -> tuple[int, dict[str, int]]:
    """The process of a server with random weights, and its ports."""
    server, ports = start_server(
        *("--model", tiny_model, "--load-format", "dummy", "--threads", 1),
        *("--kv-pages", KV_PAGES, "--max-step-tokens", STEP_TOKENS),
    )
    return server.pid, ports


@pytest.fixture
def ports(served: tuple[int, dict[str, int]]) -> dict[str, int]:
    return served[1]


@pytest.fixture
async def client(ports: dict[str, int]) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as client:
        yield client
        await until_idle(client)


def generation(tokens: int, *, n: int = 1) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text="once"), max_new_tokens=tokens, ignore_eos=True, n=n
    )


async def read_chunks(client: Client, chunks: int) -> None:
    """Start a long generation and leave it after so many chunks."""
    answers = client.generate(generation(600, n=4))
    for _ in range(chunks):
        await anext(answers)
    await answers.aclose()


def cancelled(series: dict[str, float], method: str) -> float:
    name = f'stemserve_requests_total{{code="CANCELLED",method="{method}",tenant="other"}}'
    return series[name]


async def test_b50_generations_left_after_any_chunk_are_all_counted_and_leave_no_page(
    client: Client, ports: dict[str, int], seed: int
) -> None:
    random = Random(seed)
    before = await scrape(ports)
    for _ in range(10):
        await asyncio.gather(*(read_chunks(client, random.randint(1, 4)) for _ in range(20)))
    await until_idle(client)
    after = await scrape(ports)
    assert cancelled(after, "generate") - cancelled(before, "generate") == 200
    phases = [f'{{cause="client",phase="{phase}"}}' for phase in ("queued", "prefill", "decode")]
    counts = [f"stemserve_requests_cancelled_total{phase}" for phase in phases]
    assert sum(after[name] - before[name] for name in counts) == 200


async def test_b50_calls_left_at_any_moment_leave_nothing(
    client: Client, ports: dict[str, int], seed: int
) -> None:
    """Before admission, in prefill, between tokens."""
    random = Random(seed)

    async def leave() -> None:
        call = asyncio.create_task(read_chunks(client, 600))
        await asyncio.sleep(random.expovariate(50))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    expected = (await client.score(["abc"], LIKELIHOOD, query="once")).scores
    for _ in range(15):
        await asyncio.gather(*(leave() for _ in range(20)))
    await until_idle(client)
    async with asyncio.timeout(30):  # a gauge may be some seconds old
        while (await scrape(ports))['stemserve_kv_blocks{state="used"}']:
            await asyncio.sleep(0.1)
    assert (await client.score(["abc"], LIKELIHOOD, query="once")).scores == pytest.approx(
        expected, abs=3e-4
    )


async def test_b50_the_streams_of_a_killed_client_end(
    client: Client, ports: dict[str, int]
) -> None:
    before = await scrape(ports)
    words = [sys.executable, "-c", ENDLESS_CLIENT, f"127.0.0.1:{ports['rpc']}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"token\n"
        process.kill()
    await until_idle(client)
    after = await scrape(ports)
    assert cancelled(after, "generate") == cancelled(before, "generate") + 1
    assert after[DECODE_STEPS] - before[DECODE_STEPS] < 1500


async def test_b50_a_score_call_of_thousands_of_items_stops_in_the_middle(
    client: Client, ports: dict[str, int]
) -> None:
    items, steps_in_all = [f"{number:030}" for number in range(2000)], 2000 * 29 // STEP_TOKENS
    before = await scrape(ports)
    call = asyncio.create_task(client.score(items, LIKELIHOOD, query="q"))
    async with asyncio.timeout(30):
        while (await scrape(ports))[PREFILL_STEPS] < before[PREFILL_STEPS] + 5:
            assert not call.done(), call
            await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until_idle(client)
    after = await scrape(ports)
    assert cancelled(after, "score") == cancelled(before, "score") + 1
    assert 5 <= after[PREFILL_STEPS] - before[PREFILL_STEPS] < steps_in_all / 2


async def test_b51_what_is_late_before_it_starts_is_never_computed(
    start_server: StartServer,
    fake_worker: Callable[..., str],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Steps take half a second, and a generation of one row a step is in the way."""
    log = tmp_path / "steps"
    address = fake_worker("--step-seconds", 0.5, "--vocab-size", 258, "--step-log", log)
    _, ports = start_server("--model", tiny_model, "--worker", address)
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as patient:
        generating = asyncio.create_task(read_chunks(patient, 6))
        await until_running(patient, 1)
        async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=0.05) as hasty:
            for _ in range(3):
                with pytest.raises(ClientError) as late:
                    await hasty.score(["x" * 100], LIKELIHOOD, query="y" * 100)
                assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await generating
        await until_idle(patient)
    rows = [int(line.split()[2]) for line in log.read_text().splitlines()]
    assert len(rows) >= 6
    assert max(rows) == 4  # the prompt, or the four samples


async def test_b45_what_can_never_fit_is_refused_at_once_without_a_time_to_retry(
    client: Client,
) -> None:
    """A prompt larger than the cache, and samples that outgrow it together."""
    large = generation(1)
    large.prompt.text = "a" * (KV_PAGES * 16 + 1)
    small = asyncio.create_task(client.score(["abc"], LIKELIHOOD, query="once"))
    for request in (large, generation(600, n=8)):
        with pytest.raises(ClientError) as refusal:
            await anext(client.generate(request))
        assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.value.reason == "NEVER_FITS"
        assert refusal.value.retry_after_s is None
    assert len((await small).scores) == 1


@pytest.mark.parametrize(("least_s", "ends"), [(1.0, False), (60.0, True)])
async def test_b53_a_client_may_ping_as_often_as_agreed_while_a_step_brings_nothing(
    start_server: StartServer,
    fake_worker: Callable[..., str],
    tiny_model: Path,
    tmp_path: Path,
    least_s: float,
    ends: bool,
) -> None:
    """Of pings each second the fourth that comes too early ends the connection."""
    config = tmp_path / "stemserve.toml"
    config.write_text(f"[server]\nleast_ping_interval_s = {least_s}\n")
    address = fake_worker("--step-seconds", 7, "--vocab-size", 258)
    words = ("--config", config, "--model", tiny_model, "--worker", address)
    _, ports = start_server(*words)
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['rpc']}", options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.ScoreRequest(query="q", items=["a"], log_likelihood=LIKELIHOOD)
        call = stub.Score(request, timeout=60.0)
        if ends:
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert await call.details() == "Too many pings"
        else:
            assert len((await call).scores) == 1


async def test_b57_counters_never_fall_and_no_call_makes_a_series(
    client: Client, ports: dict[str, int], seed: int
) -> None:
    random = Random(seed)
    before = await scrape(ports)
    for _ in range(20):
        for _ in range(10):
            name = f"{random.random()}"
            request = inference_pb2.ScoreRequest(
                request_id=name, items=[name], query=name, log_likelihood=LIKELIHOOD
            )
            await client.score_request(request)
            request.query = ""
            request.contexts.add(prefix_id=name)
            with pytest.raises(ClientError, match="not registered"):
                await client.score_request(request)
        now = await scrape(ports)
        assert now.keys() == before.keys()
        for series, value in before.items():
            if re.search(r"_(total|count|sum|bucket)(\{|$)", series):
                assert now[series] >= value, series
        before = now


async def test_b55_a_worker_that_hangs_is_noticed_and_replaced(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    config = tmp_path / "stemserve.toml"
    config.write_text("[worker]\nstep_timeout_least_s = 0.5\nstep_timeout_s = 2.0\n")
    server, ports = start_server(
        *("--config", config, "--model", tiny_model, "--load-format", "dummy", "--threads", 1)
    )
    (worker,) = children(server.pid)
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as client:
        before = await client.score(["abc"], LIKELIHOOD, query="once")
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(ClientError, match="UNAVAILABLE"):
            await client.score(["abc"], LIKELIHOOD, query="twice")
        assert await check_health(ports["health"]) == HealthCheckResponse.NOT_SERVING
        assert await check_health(ports["health"], "liveness") == HealthCheckResponse.SERVING
        async with asyncio.timeout(60):
            while await check_health(ports["health"]) != HealthCheckResponse.SERVING:
                await asyncio.sleep(0.1)
        after = await client.score(["abc"], LIKELIHOOD, query="once")
    assert after.scores.tolist() == before.scores.tolist()
    assert children(server.pid) != [worker]
