"""The process of the peer of bench_engine.py, with a toy engine in vLLM's place."""

import sys
from collections.abc import Iterator
from pathlib import Path

import engine_peer
import numpy as np
import pytest
from engine_peer import PeerOptions, StartEngine
from tests.benchmarks.toy_vllm import write_toy

from stemserve.service.bench.peer import Peer
from stemserve.service.bench.rows import DecodeRow, ScoreRow
from stemserve.service.bench.tokens import TokenSource

TOKENS = TokenSource(vocab=500, seed=9)


def options(path: str, logs: Path) -> PeerOptions:
    return PeerOptions(
        name="vllm",
        python=sys.executable,
        path=path,
        script=Path(engine_peer.__file__).with_name("vllm_engine.py"),
        words=("--memory", "0.2", "--kv-bytes", "1000000", "--max-model-len", "64"),
        logs=logs,
        rounds=3,
    )


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    path = str(write_toy(tmp_path / "toy"))
    with StartEngine(options=options(path, tmp_path))("0.6B", tmp_path / "Some-Model") as started:
        started.wait()
        yield started


def toy_logprob(tokens: list[int], token_id: int) -> float:
    return -(sum(tokens) % 97) - token_id / 1000


def test_a_score_row_has_log_probabilities_by_call_item_and_label(peer: Peer) -> None:
    row = ScoreRow(model="0.6B", prefix_tokens=7, item_tokens=3, items=4, calls=2)
    measured = peer.measure(row, TOKENS)
    assert measured.peer == "vllm 0.0.toy" and measured.peer_ms is not None
    assert len(measured.rounds_ms) == 3
    work = TOKENS.score_round(row, 0)
    wanted = [
        [[toy_logprob([*prefix, *item], label) for label in work.label_ids] for item in items]
        for prefix, items in zip(work.prefixes.tolist(), work.items.tolist(), strict=True)
    ]
    np.testing.assert_allclose(measured.logprobs, wanted)


def test_a_generate_row_has_the_log_probability_of_each_first_token(peer: Peer) -> None:
    row = DecodeRow(model="0.6B", prefix_tokens=6, requests=3, own_tokens=4)
    measured = peer.measure(row, TOKENS)
    assert measured.peer_ms is not None and len(measured.rounds_ms) == 3
    work = TOKENS.decode_round(row, 0)
    prompts = [[*work.prefix.tolist(), *own] for own in work.own.tolist()]
    wanted = [toy_logprob(prompt, prompt[-1]) for prompt in prompts]
    np.testing.assert_allclose(measured.logprobs, wanted)


def test_a_peer_that_ends_says_why_in_each_row_from_then_on(peer: Peer) -> None:
    bad = ScoreRow(model="0.6B", prefix_tokens=10, item_tokens=3, items=1, calls=1)
    for row in (bad, ScoreRow(model="0.6B", prefix_tokens=7, item_tokens=3, items=1, calls=1)):
        measured = peer.measure(row, TOKENS)
        assert measured.peer_ms is None and measured.why


def test_a_peer_that_does_not_start_says_why_in_every_row(tmp_path: Path) -> None:
    row = ScoreRow(model="0.6B", prefix_tokens=7, item_tokens=3, items=4, calls=2)
    start = StartEngine(options=options(str(tmp_path), tmp_path))
    with start("0.6B", tmp_path / "Some-Model") as peer:
        peer.wait()
        measured = peer.measure(row, TOKENS)
    assert measured.peer_ms is None and "No module named 'vllm'" in measured.why
