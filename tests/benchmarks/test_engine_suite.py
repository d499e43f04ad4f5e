"""Ours and a peer in one run: real servers of a tiny model, and a toy in the peer's place."""

import shutil
import sys
from pathlib import Path

import engine_peer
import pytest
from engine_peer import PeerOptions, StartEngine
from tests.benchmarks.toy_vllm import write_toy

from stemserve.service.bench.models import SHAPES
from stemserve.service.bench.open_loop import OpenLoop
from stemserve.service.bench.result import Entry, Result
from stemserve.service.bench.rows import DecodeRow, ScoreRow, UnsharedRow
from stemserve.service.bench.suite import Suite, SuitePlan
from stemserve.service.bench.target import Repeats

ROWS = (
    ScoreRow(model="0.6B", prefix_tokens=7, item_tokens=3, items=4, calls=2, goal_ms=60_000),
    DecodeRow(model="4B", prefix_tokens=6, requests=2, new_tokens=40, goal_ms=60_000),
    UnsharedRow(model="4B", prompt_tokens=9, requests=3, new_tokens=5),
)
LOOP = OpenLoop(
    shared_tokens=5, own_tokens=3, items=2, first_items_per_s=20, most_items_per_s=20, seconds=0.5
)
SERVE = ("--threads", "1", "--kv-pages", "500", "--dtype", "float32")


@pytest.fixture
def folders(tiny_model: Path, tmp_path: Path) -> Path:
    """A tiny model by the names of both."""
    for shape in SHAPES.values():
        shutil.copytree(tiny_model, tmp_path / "models" / shape.name)
    return tmp_path / "models"


def run(folders: Path, tmp_path: Path, **settings: object) -> tuple[Result, list[Entry]]:
    start = StartEngine(
        options=PeerOptions(
            name="vllm",
            python=sys.executable,
            path=str(write_toy(tmp_path / "toy")),
            script=Path(engine_peer.__file__).with_name("vllm_engine.py"),
            words=("--memory", "0.2", "--max-model-len", "64"),
            logs=tmp_path,
            rounds=2,
        )
    )
    plan: dict[str, object] = {
        "rows": ROWS,
        "open_loop": LOOP,
        "output": tmp_path / "engine.json",
        "seed": 2,
        "clients": 1,
        "repeats": Repeats(warm_up=1, score=2, decode=1),
        "serve_options": SERVE,
        "folders": folders,
        "log": tmp_path / "server.log",
        "together": True,
        **settings,
    }
    result, done = Result(facts={}), list[Entry]()
    suite = Suite(
        SuitePlan(**plan),  # type: ignore[arg-type]
        result,
        doing=lambda text: None,
        done=done.append,
        start_peer=start,
    )
    suite.run()
    return result, done


def test_servers_of_all_models_and_their_peers_run_together(folders: Path, tmp_path: Path) -> None:
    result, done = run(folders, tmp_path)
    assert [row["name"] for row in done] == [row.name for row in ROWS]
    assert [*result.rows, *result.unshared] == done and not result.notes
    assert len(result.unshared) == 1 and result.unshared[0]["ours_tokens_per_s"] > 0
    for row in done:
        assert row["ours_ms"] > 0 and not row["failures"], row["first_failure"]
        # The toy has other scores, which is what it is for: its times do not count.
        assert row["peer_rounds_ms"] and row["peer_ms"] is None
        assert "log-probabilities" in row["why_no_peer"]
    assert result.open_loop is not None and result.open_loop["levels"][0]["failures"] == 0


def test_a_server_that_does_not_start_is_tried_again_and_rows_without_time_are_named(
    folders: Path, tmp_path: Path
) -> None:
    result, done = run(
        folders,
        tmp_path,
        rows=ROWS[:1],
        serve_options=(*SERVE, "--page-size", "0"),
        fallback_words=("--page-size", "16"),
        seconds=-1.0,
    )
    (note,) = result.notes
    assert "page_size 0" in note
    assert not done and result.left_out == [ROWS[0].name, LOOP.name]
