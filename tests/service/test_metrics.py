"""Metrics by name and value, through their registry."""

from prometheus_client import CollectorRegistry, generate_latest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, serving

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.client_errors import ClientError
from stemserve.service.metrics import Metrics
from stemserve.service.request import JobUsage, Load

LOAD = Load(
    queued_requests=3,
    running_requests=2,
    queued_tokens=50,
    free_pages=60,
    cached_pages=15,
    used_pages=25,
    queued_by_priority=(1, 2, 0),
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
    assert value(registry, "kernel_fallbacks_total", **paged, reason="unsupported") == 1
    assert value(registry, "attention_kv_read_bytes_total", **cascade) == 1000
    assert value(registry, "attention_kv_avoided_bytes_total", **cascade) == 9000
    assert value(registry, "kernel_predicted_seconds_total", **cascade) == 0.004
    assert value(registry, "kernel_actual_seconds_total", **cascade) == 0.005
    assert value(registry, "kernel_predicted_seconds_total", **paged) == 0
    assert value(registry, "batch_rows_sum", phase="prefill") == 12
    assert value(registry, "step_seconds_count", phase="mixed") == 1


def test_the_load_shows_as_gauges() -> None:
    registry = CollectorRegistry()
    Metrics(registry).observe_load(LOAD)
    for priority, waiting in (("low", 1), ("normal", 2), ("high", 0)):
        assert value(registry, "requests_waiting", priority=priority) == waiting
    assert value(registry, "requests_running") == 2
    assert value(registry, "waiting_tokens") == 50
    assert value(registry, "kv_blocks", state="cached") == 15
    assert value(registry, "kv_utilization_ratio") == 0.25


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
        ok = served.metric("requests_total", method="score", code="OK", tenant="other")
        missing = served.metric("requests_total", method="score", code="NOT_FOUND", tenant="other")
        assert (ok, missing) == (20, 20)
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
