"""`stemserve bench` and its harness against a real server of a tiny model."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.client_pool import ClientFailed, ClientPool
from stemserve.service.bench.client_process import GENERATE, SCORE
from stemserve.service.bench.open_loop import OpenLoop, best, measure_open_loop
from stemserve.service.bench.rows import DecodeRow, ScoreRow
from stemserve.service.bench.suite import measure
from stemserve.service.bench.target import QUICK, Target, describe
from stemserve.service.bench.tokens import TokenSource

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
Words = Callable[..., list[str]]

SCORE_ROW = ScoreRow(model="tiny", prefix_tokens=37, item_tokens=5, items=6, calls=3)
DECODE_ROW = DecodeRow(model="tiny", prefix_tokens=40, requests=3, new_tokens=8)
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def ports(start_server: StartServer, tiny_model: Path) -> dict[str, int]:
    options = ("--model", tiny_model, "--load-format", "dummy", "--kv-pages", 2000, "--threads", 1)
    return start_server(*options)[1]


@pytest.fixture(scope="module")
def address(ports: dict[str, int]) -> str:
    return f"127.0.0.1:{ports['rpc']}"


@pytest.fixture(scope="module")
def target(ports: dict[str, int], address: str) -> Iterator[Target]:
    with ClientPool(address, 2) as pool:
        yield Target(
            address=address,
            metrics_url=f"http://127.0.0.1:{ports['metrics']}/metrics",
            pool=pool,
            tokens=TokenSource(vocab=describe(address).vocab_size, seed=11),
            repeats=QUICK,
        )


def test_a_score_row_is_cold_then_warm_and_nothing_fails(target: Target) -> None:
    measured = measure(target, SCORE_ROW)
    assert measured.failures == 0, measured.first_failure
    assert measured.ours_ms is not None and len(measured.rounds_ms) == QUICK.score
    assert measured.logprobs.shape == (3, 6, 2) and (measured.logprobs < 0).all()
    assert measured.more["warm_computes_items_only"]
    assert measured.more["steps"]


def test_the_scores_of_a_row_are_those_of_its_first_round(target: Target) -> None:
    measured = measure(target, SCORE_ROW)
    requests = target.tokens.score_round(SCORE_ROW, 0).requests()
    made = target.pool.make(SCORE, requests)
    answers = [inference_pb2.ScoreResponse.FromString(r.messages[0]) for r in made.records]
    again = np.log(np.array([answer.scores for answer in answers])).reshape(3, 6, 2)
    np.testing.assert_allclose(measured.logprobs, again, atol=1e-4)


def test_a_generate_row_has_times_of_all_tokens(target: Target) -> None:
    measured = measure(target, DECODE_ROW)
    if measured.first_failure.endswith("the machine is not quiet"):  # which is no fault of the row
        assert measured.failures == 1 and measured.ours_ms is None
    else:
        assert measured.failures == 0, measured.first_failure
        assert measured.ours_ms is not None and measured.ours_ms > 0
    assert len(measured.rounds_ms) == QUICK.decode
    assert measured.logprobs.shape == (3,)
    # On a busy machine all tokens of a call may come in one message.
    assert measured.times is None or measured.times.p50 <= measured.times.p99
    assert measured.more["gpu_idle_fraction"] is None  # there is no GPU


def test_a_row_that_the_server_refuses_is_a_failure_with_its_reason(target: Target) -> None:
    for row in (replace(SCORE_ROW, prefix_tokens=5_000), replace(DECODE_ROW, prefix_tokens=5_000)):
        measured = measure(target, row)
        assert measured.ours_ms is None and measured.failures
        assert "4096" in measured.first_failure


def test_the_open_loop_rises_until_its_last_rate_and_misses_no_call(target: Target) -> None:
    loop = OpenLoop(
        model="tiny",
        shared_tokens=12,
        own_tokens=3,
        items=4,
        first_items_per_s=40,
        more_items_per_s=40,
        most_items_per_s=80,
        seconds=1.0,
    )
    said: list[str] = []
    levels = measure_open_loop(target, loop, said.append)
    assert [level.asked_items_per_s for level in levels] == [40, 80][: len(levels)]
    assert len(said) == len(levels)
    assert levels[0].calls == 10 and levels[0].failures == 0, levels[0].first_failure
    assert levels[0].latency is not None and levels[0].send_lag is not None
    if all(level.is_kept for level in levels):
        assert best(levels) == max(level.items_per_s for level in levels)


def test_a_call_that_fails_is_noted_beside_those_that_do_not(target: Target) -> None:
    good = target.tokens.score_round(replace(SCORE_ROW, calls=1), 0).requests()[0]
    made = target.pool.make(SCORE, [good, b"", good])
    assert [bool(record.error) for record in made.records] == [False, True, False]
    assert made.failed == 1 and made.records[1].error.startswith("INVALID_ARGUMENT")


def test_messages_of_a_stream_are_kept_in_order_with_their_moments(target: Target) -> None:
    """Of a call too long for one message: tokens that the client is slow to take come together."""
    request = target.tokens.decode_round(DECODE_ROW, 0).requests(400)[0]
    record = target.pool.make(GENERATE, [request]).records[0]
    assert len(record.arrivals) == len(record.messages) > 1
    assert record.due <= record.sent <= record.arrivals[0]
    assert record.arrivals == sorted(record.arrivals)


def test_calls_are_sent_when_they_are_due(target: Target) -> None:
    good = target.tokens.score_round(replace(SCORE_ROW, calls=1), 0).requests()[0]
    made = target.pool.make(SCORE, [good] * 3, after=[0.0, 0.2, 0.4])
    dues = [record.due for record in made.records]
    np.testing.assert_allclose(np.diff(dues), 0.2)
    assert all(record.sent >= record.due for record in made.records)


def test_a_pool_without_a_server_says_so() -> None:
    with pytest.raises(ClientFailed, match=r"does not reach 127\.0\.0\.1:9"):
        ClientPool("127.0.0.1:9", 1, ready_s=3.0)


def test_the_command_measures_a_running_server_and_writes_its_files(
    stemserve_command: Words, ports: dict[str, int], address: str, tmp_path: Path
) -> None:
    output = tmp_path / "engine.json"
    words = ("bench", "--server", address, "--rows", "score 0.6B 300/30/10/1", "--quick")
    more = ("--metrics", f"http://127.0.0.1:{ports['metrics']}/metrics", "--seed", 4)
    done = subprocess.run(
        stemserve_command(*words, *more, "--clients", 1, "--output", output),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert f"wrote {output}" in done.stdout
    assert "goal None" not in done.stdout + done.stderr
    content = json.loads(output.read_text())
    (row,) = content["rows"]
    assert row["ours_ms"] > 0 and row["failures"] == 0
    assert row["peer_ms"] is None and row["why_no_peer"]
    assert content["seed"] == 4 and content["summary"]["rows_measured"] == 1
    assert output.with_suffix(".csv").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rows", "nothing*"), "no row is named nothing*"),
        (("--server", "127.0.0.1:9", "--output", "x.json"), "127.0.0.1:9: UNAVAILABLE"),
    ],
)
def test_the_command_ends_with_one_line_where_it_cannot_measure(
    stemserve_command: Words, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = subprocess.run(
        stemserve_command("bench", *words),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )
    assert done.returncode == 1 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_command_lists_the_rows(stemserve_command: Words) -> None:
    done = subprocess.run(
        stemserve_command("bench", "--list"), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "decode 4B 50000/16" in done.stdout.splitlines()
    assert len(done.stdout.splitlines()) == 19
