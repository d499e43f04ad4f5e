"""What counts in a result file."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.client_process import CallRecord
from stemserve.service.bench.measured import MeasuredRow, Percentiles, percentiles
from stemserve.service.bench.open_loop import Level, OpenLoop, best
from stemserve.service.bench.peer import PeerRow
from stemserve.service.bench.result import Result
from stemserve.service.bench.rows import DecodeRow, ScoreRow, UnsharedRow
from stemserve.service.bench.scrape import parse
from stemserve.service.bench.token_arrivals import CallFailed, token_arrivals

SCORE = ScoreRow(
    model="m", prefix_tokens=1, item_tokens=1, items=50, calls=1, floor_ms=1, goal_ms=10
)
DECODE = DecodeRow(model="m", prefix_tokens=1, requests=3, floor_ms=1, goal_ms=4)
LOGPROBS = np.random.default_rng(3).normal(-12, 1, (1, 50, 2))


def ours(ms: float | None = 8.0, *, failures: int = 0) -> MeasuredRow:
    return MeasuredRow(
        row=SCORE,
        ours_ms=ms,
        rounds_ms=(),
        failures=failures,
        times=Percentiles(p50=8, p90=9, p99=10),
        logprobs=LOGPROBS,
    )


def peer(ms: float | None = 16.0, shift: float = 0.0) -> PeerRow:
    return PeerRow(peer="other 1", peer_ms=ms, why="" if ms else "lost", logprobs=LOGPROBS + shift)


def result() -> Result:
    return Result(facts={"seed": 1})


def test_a_peer_that_agrees_counts_with_its_ratio() -> None:
    entry = result().add_row(ours(), peer(16.0, shift=0.01))
    assert entry["peer_ms"] == 16 and entry["speedup"] == 2 and entry["at_goal"]
    assert entry["agreement"]["largest_difference"] == pytest.approx(0.01, rel=1e-3)


def test_a_peer_with_other_scores_has_no_time_and_says_why() -> None:
    for wrong in (peer(shift=0.4), replace(peer(), logprobs=LOGPROBS[:, ::-1])):
        entry = result().add_row(ours(), wrong)
        assert entry["peer_ms"] is None and entry["speedup"] is None
        assert "log-probabilities" in entry["why_no_peer"]


def test_a_peer_that_read_other_things_is_not_comparable() -> None:
    entry = result().add_row(ours(), replace(peer(), logprobs=LOGPROBS[:, :3]))
    assert entry["peer_ms"] is None and "not comparable" in entry["why_no_peer"]


def test_rows_without_a_peer_say_why_and_do_not_count() -> None:
    made = result()
    made.add_row(ours(8.0), peer(32.0))
    made.add_row(ours(20.0), peer(20.0))
    made.add_row(ours(5.0), peer(None))
    assert made.rows[2]["why_no_peer"] == "lost"
    assert made.summary["rows"] == 2 and made.summary["rows_at_goal"] == 1
    assert made.summary["rows_measured"] == 3 and made.summary["rows_measured_at_goal"] == 2
    assert made.summary["speedup_geomean"] == pytest.approx(math.sqrt(4 * 1))


@pytest.mark.parametrize(("ours_ms", "at_goal"), [(500.0, True), (1100.0, True), (1200.0, False)])
def test_a_row_without_sharing_may_have_nine_tenths_of_the_peers_throughput(
    ours_ms: float, at_goal: bool
) -> None:
    made = result()
    row = UnsharedRow(model="m", requests=50, new_tokens=20)
    entry = made.add_row(replace(ours(ours_ms), row=row), peer(1000.0))
    assert (entry["ours_tokens_per_s"], entry["at_goal"]) == (
        pytest.approx(1e6 / ours_ms, rel=1e-3),
        at_goal,
    )
    assert made.unshared == [entry] and not made.rows and made.summary["rows"] == 0


def test_a_row_with_failures_is_not_at_its_goal() -> None:
    made = result()
    assert not made.add_row(ours(8.0, failures=1), peer())["at_goal"]
    assert made.add_row(ours(None, failures=6), peer())["at_goal"] is None
    assert made.summary["failures"] == 7 and made.summary["rows"] == 1


def test_idle_is_what_all_decode_steps_waited_over_all_their_time() -> None:
    made = result()
    for busy, idle in ((0.9, 0.1), (2.9, 0.1)):
        more: dict[str, float | bool | None] = {"device_busy_s": busy, "device_idle_s": idle}
        made.add_row(replace(ours(), row=DECODE, more=more), peer())
    assert made.summary["gpu_idle_fraction"] == pytest.approx(0.2 / 4)
    assert result().summary["gpu_idle_fraction"] is None


def level(rate: float, p99: float, failures: int = 0) -> Level:
    return Level(
        asked_items_per_s=rate,
        items_per_s=rate - 1,
        calls=10,
        failures=failures,
        first_failure="",
        latency=Percentiles(p50=1, p90=2, p99=p99),
        send_lag=None,
        busiest_client=0.1,
    )


def test_the_open_loop_counts_rates_without_failures_and_within_500_ms() -> None:
    levels = (level(500, 20), level(1000, 500), level(1500, 501), level(2000, 30, failures=1))
    assert best(levels) == 999
    assert best(levels[2:]) is None
    made = result()
    made.add_open_loop(OpenLoop(), levels)
    assert made.summary["items_per_s_at_p99_500ms"] == 999


def test_the_files_hold_every_row(tmp_path: Path) -> None:
    made, path = result(), tmp_path / "h200" / "engine.json"
    made.add_row(ours(), peer())
    made.add_row(ours(), peer(None))
    made.write(path)
    content = json.loads(path.read_text())
    assert content["seed"] == 1 and content["summary"] == made.summary
    needed = {"name", "ours_ms", "peer", "peer_ms", "floor_ms", "goal_ms", "failures"}
    assert all(needed <= row.keys() for row in content["rows"])
    with path.with_suffix(".csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["peer_ms"] for row in table] == ["16.0", ""]
    assert {file.name for file in path.parent.iterdir()} == {"engine.json", "engine.csv"}


def test_percentiles_are_milliseconds() -> None:
    found = percentiles(np.arange(101) / 1e3)
    assert found == Percentiles(p50=50, p90=90, p99=99)
    assert percentiles([]) is None


def test_a_scrape_is_read_by_name_and_labels_and_subtracted() -> None:
    registry = CollectorRegistry()
    counter = Counter("stemserve_device_busy_seconds", "text", ["phase"], registry=registry)
    plain = Counter("stemserve_output_tokens", "text", registry=registry)

    def reading() -> str:
        return generate_latest(registry).decode()

    counter.labels("decode").inc(2)
    counter.labels("prefill").inc(1)
    before = parse(reading())
    counter.labels("decode").inc(0.5)
    plain.inc(3)
    grown = parse(reading()).since(before)
    assert before.total("device_busy_seconds_total") == 3
    assert grown.total("device_busy_seconds_total", phase="decode") == 0.5
    assert grown.total("device_busy_seconds_total", phase="prefill") == 0
    assert grown.total("output_tokens_total") == 3
    assert grown.total("missing") == 0


def record(counts: list[int], arrivals: list[float]) -> CallRecord:
    messages = [
        inference_pb2.GenerateResponse(token_ids=[1] * count, logprobs=[-0.5] * count)
        for count in counts
    ]
    return CallRecord(
        due=0.0,
        sent=0.5,
        arrivals=arrivals,
        messages=[message.SerializeToString() for message in messages],
    )


def test_tokens_of_one_message_share_the_time_since_the_message_before() -> None:
    arrived = token_arrivals(record([1, 4, 2, 0], [1.0, 1.4, 1.5, 1.6]), new_tokens=7)
    assert arrived.seconds_to_first == 0.5
    np.testing.assert_allclose(arrived.gaps, [0.1] * 4 + [0.05] * 2)


def test_tokens_of_one_message_alone_have_no_time_between_them() -> None:
    arrived = token_arrivals(record([3], [1.0]), new_tokens=3)
    assert arrived.seconds_to_first == 0.5 and not len(arrived.gaps)


def test_calls_that_lack_tokens_are_failures() -> None:
    with pytest.raises(CallFailed, match="3 tokens came instead of 4"):
        token_arrivals(record([1, 2], [1, 2]), new_tokens=4)
    with pytest.raises(CallFailed, match="UNAVAILABLE"):
        token_arrivals(CallRecord(due=0, error="UNAVAILABLE: gone"), new_tokens=3)
