"""The start of a worker with captured pieces: taken where they give the same, else dropped."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.worker.tiny_model import make_runner, save_tiny_model, step_limits

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32
from stemserve.worker.graphs.capture import Capture
from stemserve.worker.graphs.piece_check import check_steps, difference
from stemserve.worker.graphs.score_pieces import capture_pieces
from stemserve.worker.models.loader import load_model
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.steps.step import decode_step

Step = Callable[[worker_pb2.StepPlan], worker_pb2.StepResult]


class Pieces:
    """Steps that are taken by others once pieces are captured."""

    def __init__(self, before: Step, after: Step | None) -> None:
        self._step = before
        self._after = after
        self.is_dropped = False

    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        return self._step(plan)

    def capture(
        self, model: Transformer, buckets: Sequence[int], capture: Capture
    ) -> Iterator[int]:
        yield from buckets
        if self._after is None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self._step = self._after

    def drop_pieces(self) -> None:
        self.is_dropped = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path, seed=41)
    return path


def start(folder: Path, before: Step, after: Step | None, *, exact: bool = False) -> Pieces:
    pieces = Pieces(before, after)
    model, limits = load_model(folder), step_limits(4)
    capture_pieces(pieces, pieces, model, limits, check=lambda: None, exact=exact)
    return pieces


def test_pieces_that_give_the_same_are_taken(folder: Path) -> None:
    eager, captured = make_runner(folder), make_runner(folder, buckets=[64, 256])
    assert not start(folder, eager.runner.step, captured.runner.step).is_dropped


@pytest.mark.parametrize("exact", [True, False])
def test_a_deterministic_worker_takes_pieces_of_the_same_bits_only(
    folder: Path, exact: bool
) -> None:
    eager = make_runner(folder).runner

    def nearly(plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        result = eager.step(plan)
        found = decode_float32("", result.gather_logprobs) * np.float32(1 + 2**-23)
        result.gather_logprobs = found.astype(np.float32).tobytes()
        return result

    assert not start(folder, eager.step, eager.step, exact=exact).is_dropped
    assert start(folder, eager.step, nearly, exact=exact).is_dropped == exact


def test_pieces_that_cannot_be_captured_are_dropped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert start(folder, make_runner(folder).runner.step, None).is_dropped
    assert "not permitted when stream is capturing" in caplog.text


def test_pieces_that_give_something_else_are_dropped(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, seed=42)
    with caplog.at_level(logging.ERROR):
        ours, others = make_runner(folder).runner.step, make_runner(tmp_path).runner.step
        assert start(folder, ours, others).is_dropped
    assert "log-probabilities differ" in caplog.text


def test_numbers_that_are_not_finite_differ_from_all_others(folder: Path) -> None:
    tiny = make_runner(folder)
    (plan, *_) = check_steps(step_limits(4))
    expected = tiny.runner.step(plan)
    broken = worker_pb2.StepResult(gather_logprobs=b"\0\0\xc0\x7f" * 10)
    assert difference(broken, expected) == float("inf")
    assert difference(expected, expected) == 0


def test_a_check_that_ends_the_start_ends_it(folder: Path) -> None:
    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    pieces = Pieces(make_runner(folder).runner.step, None)
    with pytest.raises(Stopped):
        capture_pieces(pieces, pieces, load_model(folder), step_limits(4), check=stop)


@pytest.mark.parametrize("pages", [1, 5, 16, 1000])
@pytest.mark.parametrize("rows", [1, 4, 33, 1 << 14])
def test_the_steps_fit_any_limits(pages: int, rows: int) -> None:
    limits = replace(step_limits(4), kv_pages=pages, max_step_tokens=rows)
    for plan in check_steps(limits):
        decode_step(plan, limits)  # raises BadPlan
