"""Metrics by name and value, through their registry."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, serving
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.client import ClientError
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.metrics.instruments import BeforeScrape
from stemserve.service.metrics.page import families, label_values, page
from stemserve.service.metrics.step_metrics import StepMetrics
from stemserve.service.request import JobUsage, Load
from stemserve.service.serving import metrics_port
from stemserve.service.serving.metrics_port import wait_for_notes

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"

LOAD = Load(
    queued_requests=3,
    running_requests=2,
    queued_tokens=50,
    free_pages=60,
    cached_pages=15,
    used_pages=25,
    queued_by_priority=(1, 2, 0),
    oldest_queued_s=1.5,
    pinned_pages=4,
    steps_in_flight=1,
)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"stemserve_{name}", labels)


def series(registry: CollectorRegistry) -> set[str]:
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def step_result() -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        step_seconds=0.01,
        groups=[
            worker_pb2.GroupReport(
                phase="prefill",
                kernel=inference_pb2.KERNEL_CASCADE,
                reason="cost_model",
                rows=12,
                kv_read_bytes=1000,
                kv_avoided_bytes=9000,
                predicted_seconds=0.004,
                actual_seconds=0.005,
            ),
            worker_pb2.GroupReport(
                phase="decode",
                kernel=inference_pb2.KERNEL_PAGED,
                reason="fallback",
                rows=4,
                predicted_seconds=0.1,
            ),
        ],
    )


def test_a_step_counts_its_choices_bytes_and_rows() -> None:
    registry = CollectorRegistry()
    Metrics(registry).observe_step(step_result(), LOAD)
    cascade = {"op": "prefill", "path": "cascade"}
    paged = {"op": "decode", "path": "paged"}
    assert value(registry, "kernel_selected_total", **cascade, reason="cost_model") == 1
    assert value(registry, "kernel_fallbacks_total", **paged, reason="refused") == 1
    assert value(registry, "attention_kv_read_bytes_total", **cascade) == 1000
    assert value(registry, "attention_kv_avoided_bytes_total", **cascade) == 9000
    assert value(registry, "kernel_predicted_seconds_total", **cascade) == 0.004
    assert value(registry, "kernel_actual_seconds_total", **cascade) == 0.005
    assert value(registry, "kernel_predicted_seconds_total", **paged) == 0
    assert value(registry, "batch_rows_sum", phase="prefill") == 12
    assert value(registry, "step_seconds_count", phase="mixed") == 1


def test_fallbacks_are_counted_by_what_was_in_the_way() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    result = step_result()
    result.groups[1].fallback = "lacking"
    result.fallbacks.add(path="decode_graph", reason="rows", count=3)
    result.fallbacks.add(path="pieces", reason="dropped", count=1)
    metrics.observe_step(result, LOAD)
    paged = {"op": "decode", "path": "paged"}
    assert value(registry, "kernel_fallbacks_total", **paged, reason="lacking") == 1
    assert value(registry, "graph_fallbacks_total", path="decode_graph", reason="rows") == 3
    assert value(registry, "graph_fallbacks_total", path="pieces", reason="dropped") == 1


def test_probes_count_what_the_next_best_kernel_would_have_saved() -> None:
    registry = CollectorRegistry()
    result = step_result()
    for chosen, other in ((0.004, 0.001), (0.002, 0.008)):
        result.probes.add(
            phase="prefill",
            chosen=inference_pb2.KERNEL_CASCADE,
            runner_up=inference_pb2.KERNEL_CODEC,
            chosen_seconds=chosen,
            runner_up_seconds=other,
        )
    Metrics(registry).observe_step(result, LOAD)
    assert value(registry, "kernel_probes_total", op="prefill", path="codec") == 1
    assert value(registry, "kernel_probes_total", op="prefill", path="cascade") == 1
    assert value(registry, "kernel_probed_seconds_total", op="prefill") == 0.006
    assert value(registry, "kernel_regret_seconds_total", op="prefill") == 0.003
    assert value(registry, "kernel_probe_ratio_bucket", op="prefill", le="0.25") == 1
    assert value(registry, "kernel_probe_ratio_bucket", op="prefill", le="4.0") == 2


def test_counts_of_a_new_worker_are_added_to_those_of_the_last() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(registry)
    for evicted, suspensions in ((5, 1), (9, 1), (2, 3)):
        metrics.observe_load(replace(LOAD, evicted_pages=evicted, suspensions=suspensions))
    assert value(registry, "prefix_evictions_total", tier="hbm", reason="capacity") == 11
    assert value(registry, "kv_preemptions_total") == 3 + 1


def test_an_engine_stalls_while_work_is_pending_and_no_step_ends() -> None:
    registry, now = CollectorRegistry(), [100.0]
    metrics = StepMetrics(registry, lambda: now[0])
    idle = replace(LOAD, queued_requests=0, steps_in_flight=0)
    stalls: list[float | None] = []
    for load, ended in ((idle, False), (LOAD, False), (LOAD, False), (LOAD, True), (idle, False)):
        if ended:
            metrics.observe_step(step_result(), load)
        else:
            metrics.observe_load(load)
        now[0] += 10
        stalls.append(value(registry, "engine_stall_seconds"))
    assert stalls == [0, 10, 20, 10, 0]


def test_the_page_of_metrics_is_what_the_code_says() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run make metrics-docs"


def test_every_label_has_few_values() -> None:
    for family in families():
        for label, values in label_values(family).items():
            assert len(values) <= 20, (family.name, label)


def test_every_histogram_of_times_sees_a_call_of_50_ms() -> None:
    times = [f for f in families() if f.type == "histogram" and f.name.endswith("_seconds")]
    assert times
    for family in times:
        assert "0.05" in label_values(family)["le"], family.name


def test_the_load_shows_as_gauges() -> None:
    registry = CollectorRegistry()
    Metrics(registry).observe_load(LOAD)
    for priority, waiting in (("low", 1), ("normal", 2), ("high", 0)):
        assert value(registry, "requests_waiting", priority=priority) == waiting
    assert value(registry, "requests_running") == 2
    assert value(registry, "waiting_tokens") == 50
    assert value(registry, "requests_waiting_all") == 3
    assert value(registry, "queue_oldest_seconds") == 1.5
    assert value(registry, "kv_blocks", state="cached") == 15
    assert value(registry, "kv_blocks", state="used") == 21
    assert value(registry, "kv_blocks", state="pinned") == 4
    assert value(registry, "kv_utilization_ratio") == 0.25


def test_drafts_are_counted_by_what_came_of_them() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.used(JobUsage(drafted_tokens=10, accepted_tokens=7), looked_up_tokens=3)
    assert value(registry, "draft_tokens_total", outcome="accepted") == 7
    assert value(registry, "draft_tokens_total", outcome="rejected") == 3
    metrics.observe_step(step_result(), replace(LOAD, draft_steps=4))
    metrics.observe_step(step_result(), replace(LOAD, draft_steps=6))
    assert value(registry, "draft_steps_total") == 6


def test_b57_no_series_appears_after_the_start() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    before = series(registry)
    metrics.observe_step(step_result(), LOAD)
    metrics.used(JobUsage(computed_tokens=1, cached_tokens=2), looked_up_tokens=3)
    metrics.cancelled("decode", by_deadline=True)
    metrics.finished("score", "OK", 0.1)
    metrics.first_token(JobUsage(cached_tokens=2), 3, 0.1)
    assert series(registry) == before


def test_first_tokens_are_told_apart_by_what_the_cache_held() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for cached in (0, 5, 9, 10):
        metrics.first_token(JobUsage(cached_tokens=cached), 10, 0.1)
    counts = [
        value(registry, "time_to_first_token_seconds_count", prefix=prefix)
        for prefix in ("miss", "partial", "hit")
    ]
    assert counts == [1, 1, 2]


async def test_b57_calls_with_any_ids_make_no_new_series() -> None:
    async with serving(BigramEngine(random_bigrams(BYTE_VOCABULARY))) as served:
        before = series(served.registry)
        for index in range(20):
            request = inference_pb2.ScoreRequest(request_id=f"{index}", items=["ab"], query="q")
            request.log_likelihood.SetInParent()
            await served.client.score_request(request)
            request.query = ""
            request.contexts.add(prefix_id=f"unknown-{index}")
            try:
                await served.client.score_request(request)
            except ClientError:
                continue
        assert series(served.registry) == before
        ended = {"method": "score", "tenant": "other"}
        assert served.metric("requests_total", code="OK", **ended) == 20
        # A status may reach its client before the server goes on.
        await until(lambda: served.metric("requests_total", code="NOT_FOUND", **ended) == 20)
        assert served.metric("score_items_total") == 20
        assert served.metric("score_request_items_count") == 20
        assert served.metric("request_queue_seconds_count", method="score", priority="normal") == 20


async def test_a_generation_counts_its_tokens_and_times() -> None:
    async with serving(BigramEngine(random_bigrams(BYTE_VOCABULARY))) as served:
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Context(text="abc"), max_new_tokens=5, ignore_eos=True
        )
        assert [step async for step in served.client.generate(request)]
        assert served.metric("output_tokens_total") == 5
        assert served.metric("prompt_tokens_total", source="computed") == 3
        assert served.metric("prefix_lookup_tokens_total") == 3
        assert served.metric("time_to_first_token_seconds_count", prefix="miss") == 1
        assert served.metric("inter_token_seconds_count") == 4
        assert served.metric("time_per_output_token_seconds_count") == 1


def test_b57_two_registries_hold_two_sets_of_metrics() -> None:
    Metrics(CollectorRegistry())
    Metrics(CollectorRegistry())


def test_what_waits_to_be_counted_is_counted_for_a_scrape() -> None:
    registry = CollectorRegistry()
    waiting: list[float] = []
    registry.register(BeforeScrape(lambda: late.inc(waiting.pop())))
    late = Counter("late", "Counted when somebody asks", registry=registry)
    waiting.append(3.0)
    assert b"late_total 3.0" in generate_latest(registry)
    assert not waiting


async def test_a_scrape_waits_for_what_the_loop_notes_behind_an_answer() -> None:
    loop = asyncio.get_running_loop()
    noted: list[str] = []
    held = threading.Event()
    loop.call_soon(held.wait, 30.0)  # as a busy loop: the scrape begins before anything is noted
    loop.call_soon(noted.append, "call")

    def scrape() -> list[str]:
        asking = threading.Timer(0.05, held.set)
        asking.start()
        wait_for_notes(loop)
        return list(noted)

    assert await asyncio.to_thread(scrape) == ["call"]


async def test_a_scrape_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "NOTES_S", 0.01)
    ended = asyncio.new_event_loop()
    wait_for_notes(ended)  # nobody runs it
    ended.close()
    wait_for_notes(ended)
