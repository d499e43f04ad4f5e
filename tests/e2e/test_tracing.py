"""Traces of calls of a real server and worker, as a real receiver gets them."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.e2e.served import scrape, until_running
from tests.e2e.traced_calls import (
    PATIENCE_S,
    SECRET,
    Caller,
    children,
    generate,
    named,
    names,
    score_request,
    trace_of,
)
from tests.service.otlp_receiver import Receiver, otlp_receiver, values
from typer.testing import CliRunner

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError
from stemserve.service.commands.app import app

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]

SCORE = "stemserve.v1.Inference/Score"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def ports(start_server: StartServer, tiny_model: Path, receiver: Receiver) -> dict[str, int]:
    words: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
    words += ["--kv-pages", 300, "--max-step-tokens", 64, "--otlp-endpoint", receiver.endpoint]
    return start_server(*words, "--log-format", "json", "--trace-sample-ratio", 0)[1]


@pytest.fixture
def caller() -> Caller:
    return Caller()


@pytest.fixture
async def client(ports: dict[str, int], caller: Caller) -> AsyncIterator[Client]:
    target = f"127.0.0.1:{ports['rpc']}"
    async with Client(target, timeout_s=60.0, headers=caller.headers) as client:
        yield client


async def test_a_score_call_is_a_tree_under_the_callers_span(
    client: Client, caller: Caller, receiver: Receiver
) -> None:
    scores = await client.score_request(score_request(20))  # more rows than a step has
    spans = await trace_of(receiver, caller)
    (call,) = named(spans, "stemserve.v1.Inference/Score")
    assert call.parent_span_id == caller.span_id and call.trace_state == "shop=7"
    assert call.kind == Span.SPAN_KIND_SERVER and call.status.code == Status.STATUS_CODE_UNSET
    said = values(call.attributes)
    assert said["rpc.response.status_code"] == "OK" and "error.type" not in said
    assert said["gen_ai.operation.name"] == "score"
    assert said["stemserve.score.items"] == 20 and said["stemserve.request.id"] == "mine"
    assert said["gen_ai.usage.input_tokens"] == scores.usage.prompt_tokens
    assert said["stemserve.usage.computed_tokens"] == scores.usage.computed_tokens
    assert str(said["gen_ai.request.model"]).startswith("tiny-model")
    assert names(children(spans, call)) == ["tokenize", "queue", "engine"]
    (engine,) = named(spans, "engine")
    steps = children(spans, engine)
    assert len(steps) > 1 and set(names(steps)) == {"step"}
    rows = 0
    for step in steps:
        plan, run = children(spans, step)
        assert (plan.name, run.name) == ("plan", "run")
        groups = children(spans, run)
        counted = [values(group.attributes) for group in groups]
        assert sum(int(str(g["stemserve.attention.rows"])) for g in counted) == values(
            step.attributes
        ).get("stemserve.step.rows")
        for group, said in zip(groups, counted, strict=True):
            assert group.name == f"attention {said['stemserve.attention.kernel']}"
            assert float(str(said["stemserve.attention.predicted_seconds"])) > 0
            seconds = (group.end_time_unix_nano - group.start_time_unix_nano) / 1e9
            assert seconds == pytest.approx(said["stemserve.attention.actual_seconds"], abs=1e-6)
        rows += int(str(values(step.attributes)["stemserve.step.rows.prefill"]))
    assert rows == scores.usage.computed_tokens
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        for child in children(spans, span):
            assert span.start_time_unix_nano <= child.start_time_unix_nano
            assert child.end_time_unix_nano <= span.end_time_unix_nano


async def test_kv_bytes_of_the_groups_are_those_of_the_answer(
    client: Client, caller: Caller, receiver: Receiver
) -> None:
    scores = await client.score_request(score_request())
    spans = await trace_of(receiver, caller)
    groups = [values(s.attributes) for s in spans if s.name.startswith("attention ")]
    read = sum(int(str(group["stemserve.attention.kv_read_bytes"])) for group in groups)
    assert read == pytest.approx(scores.usage.kv_read_bytes, abs=2)


async def test_a_generation_says_how_it_went(
    client: Client, caller: Caller, receiver: Receiver
) -> None:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text=SECRET), max_new_tokens=100, ignore_eos=True, n=2
    )
    request.sampling.top_k = 7
    async for _ in client.generate(request):
        pass
    spans = await trace_of(receiver, caller)
    (call,) = named(spans, "stemserve.v1.Inference/Generate")
    said = values(call.attributes)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.max_tokens"] == 100 and said["gen_ai.request.top_k"] == 7
    assert "gen_ai.request.temperature" not in said
    assert said["gen_ai.request.choice.count"] == 2
    assert said["gen_ai.usage.output_tokens"] == 200
    assert said["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert 0 < float(str(said["gen_ai.response.time_to_first_chunk"])) < 60
    totals = values(named(spans, "engine")[0].attributes)
    assert totals["stemserve.steps"] == 100  # the first has the prompt and draws too
    assert totals["stemserve.steps.shown"] == 64 == len(named(spans, "step"))


async def test_commands_are_part_of_the_trace_around_them(
    ports: dict[str, int], receiver: Receiver, caller: Caller
) -> None:
    words = ["score", "--server", f"127.0.0.1:{ports['rpc']}", "--query", SECRET, "--item", "a b"]
    ((_, parent), _) = caller.headers()
    done = await asyncio.to_thread(CliRunner().invoke, app, ["--traceparent", parent, *words])
    assert done.exit_code == 0, done.output
    (call,) = named(await trace_of(receiver, caller), SCORE)
    assert call.parent_span_id == caller.span_id
    wrong = await asyncio.to_thread(CliRunner().invoke, app, ["--traceparent", "00-1-2", *words])
    assert wrong.exit_code == 2
    assert "--traceparent (TRACEPARENT) '00-1-2' is not like" in wrong.output


async def test_calls_that_fail_or_are_given_up_have_their_status(
    ports: dict[str, int], receiver: Receiver
) -> None:
    target = f"127.0.0.1:{ports['rpc']}"
    wrong, late, left = Caller(), Caller(), Caller()
    async with Client(target, timeout_s=60.0, headers=wrong.headers) as client:
        with pytest.raises(ClientError):
            await client.score_request(inference_pb2.ScoreRequest(query=SECRET, items=[SECRET]))
    async with Client(target, timeout_s=0.2, headers=late.headers) as client:
        with pytest.raises(ClientError) as error:
            await generate(client)
        assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    async with Client(target, timeout_s=60.0, headers=left.headers) as client:
        task = asyncio.create_task(generate(client))
        await until_running(client, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    expected = (
        (wrong, "Score", "INVALID_ARGUMENT", Status.STATUS_CODE_UNSET),
        (late, "Generate", "DEADLINE_EXCEEDED", Status.STATUS_CODE_ERROR),
        (left, "Generate", "CANCELLED", Status.STATUS_CODE_UNSET),
    )
    for caller, method, code, status in expected:
        spans = await trace_of(receiver, caller)
        async with asyncio.timeout(PATIENCE_S):
            while not (calls := named(spans, f"stemserve.v1.Inference/{method}")):
                await asyncio.sleep(0.05)
                spans = receiver.of_trace(caller.trace_id)
        said = values(calls[0].attributes)
        assert said["rpc.response.status_code"] == said["error.type"] == code
        assert calls[0].status.code == status
        if method == "Generate":
            assert {"tokenize", "queue", "engine", "step"} <= set(names(spans))
        else:
            assert said["stemserve.error"] == "InvalidRequest" and len(spans) == 1


async def test_who_does_not_sample_is_not_traced(
    ports: dict[str, int], receiver: Receiver, caller: Caller
) -> None:
    target = f"127.0.0.1:{ports['rpc']}"
    before = len(receiver.spans)
    for headers in (Caller(is_sampled=False).headers, lambda: ()):
        async with Client(target, timeout_s=60.0, headers=headers) as client:
            await client.score_request(score_request())
    async with Client(target, timeout_s=60.0, headers=caller.headers) as client:
        await client.score_request(score_request())
    spans = await trace_of(receiver, caller)
    assert len(receiver.spans) == before + len(spans)


async def test_calls_of_a_stream_are_spans_of_their_own(
    client: Client, caller: Caller, receiver: Receiver
) -> None:
    async def requests() -> AsyncIterator[inference_pb2.ScoreRequest]:
        for _ in range(3):
            yield score_request()

    async for _ in client.score_stream(requests()):
        pass
    async with asyncio.timeout(PATIENCE_S):
        while len(calls := named(receiver.of_trace(caller.trace_id), SCORE)) < 3:
            await asyncio.sleep(0.05)
    assert {call.parent_span_id for call in calls} == {caller.span_id}
    assert all(values(call.attributes)["stemserve.score.items"] == 5 for call in calls)


async def test_histograms_lead_to_the_traces(
    client: Client, caller: Caller, ports: dict[str, int]
) -> None:
    await client.score_request(score_request())

    def scrape_as(accepted: str) -> tuple[str, str]:
        url = f"http://127.0.0.1:{ports['metrics']}/metrics"
        with urlopen(Request(url, headers={"Accept": accepted}), timeout=30) as answer:
            return answer.headers["Content-Type"], answer.read().decode()

    kind, text = await asyncio.to_thread(scrape_as, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    found = f'# {{trace_id="{caller.trace_id.hex()}"}}'
    series = {line.partition("{")[0] for line in text.splitlines() if found in line}
    assert series == {
        "stemserve_request_duration_seconds_bucket",
        "stemserve_request_queue_seconds_bucket",
        "stemserve_score_item_seconds_bucket",
    }
    kind, text = await asyncio.to_thread(scrape_as, "text/plain")
    assert "trace_id" not in text


async def test_what_became_of_spans_is_counted(
    client: Client, caller: Caller, receiver: Receiver, ports: dict[str, int]
) -> None:
    await client.score_request(score_request())
    await trace_of(receiver, caller)
    async with asyncio.timeout(PATIENCE_S):
        name = 'stemserve_trace_spans_total{outcome="exported"}'
        while (await scrape(ports))[name] < len(receiver.spans):
            await asyncio.sleep(0.05)
    assert receiver.resource["service.name"] == "stemserve"


async def test_logs_are_objects_of_both_processes_with_the_calls_ids_and_no_text(
    start_server: StartServer, tiny_model: Path
) -> None:
    words: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
    server, ports = start_server(*words, "--log-format", "json", "--log-calls")
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as client:
        await client.score_request(score_request())
    server.terminate()
    log = Path(f"/proc/{server.pid}/fd/2").resolve()
    assert await asyncio.to_thread(server.wait, 30) == 0
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["process"] for line in lines} == {"service", "worker"}
    (call,) = [line for line in lines if line["logger"] == "stemserve.calls"]
    assert call["code"] == "OK" and len(call["call_id"]) == 16 and "trace_id" not in call
    assert "xylophone" not in text


async def test_a_server_sends_what_it_has_before_it_ends(
    start_server: StartServer, tiny_model: Path, caller: Caller
) -> None:
    with otlp_receiver() as receiver:
        words: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
        server, ports = start_server(*words, "--otlp-endpoint", receiver.endpoint)
        target = f"127.0.0.1:{ports['rpc']}"
        async with Client(target, timeout_s=60.0, headers=caller.headers) as client:
            running = asyncio.create_task(generate(client, tokens=200))
            await until_running(client, 1)
            server.terminate()
            await running
        assert await asyncio.to_thread(server.wait, 30) == 0
        (call,) = named(receiver.of_trace(caller.trace_id), "stemserve.v1.Inference/Generate")
        assert values(call.attributes)["gen_ai.usage.output_tokens"] == 200
