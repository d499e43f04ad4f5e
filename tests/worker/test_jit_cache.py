"""Folders that cannot keep what is compiled are named when a worker starts."""

import errno
import os
import queue
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.config import ConfigError
from stemserve.worker.jit_cache import check_folder, check_triton_cache, move_triton_cache
from stemserve.worker.step_thread import Outcome, StepThread
from stemserve.worker.steps.step import Step


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_tritons_own_folder_can_be_used() -> None:
    pytest.importorskip("triton")
    check_triton_cache()


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=r"cache cannot keep .*TRITON_CACHE_DIR"):
        check_folder(tmp_path / "cache")


@pytest.fixture
def cache_folder() -> Iterator[str]:
    knobs = pytest.importorskip("triton").knobs
    before = knobs.cache.dir
    yield before
    knobs.cache.dir = before


def test_the_cache_moves_to_the_first_folder_with_room(cache_folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "room").mkdir()
    assert move_triton_cache([tmp_path / "file", tmp_path / "room"])
    moved = Path(pytest.importorskip("triton").knobs.cache.dir)
    assert moved.parent == tmp_path / "room" and moved.is_dir()
    # Full as well, and nowhere else to go.
    assert not move_triton_cache([tmp_path / "file", tmp_path / "room"])


@dataclass(frozen=True)
class Ran:
    step_id: int

    def result(self) -> worker_pb2.StepResult:
        return worker_pb2.StepResult(step_id=self.step_id)


class FullDisk:
    """A runner that cannot compile what its first steps need."""

    uses_gpu = False
    num_classes = 0

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def decode(self, plan: worker_pb2.StepPlan) -> Step:
        raise AssertionError("no step is divided")

    def launch(self, plan: worker_pb2.StepPlan) -> Ran:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/kernel.json")
        return Ran(plan.step_id)


@pytest.mark.parametrize(
    ("failures", "folders", "error"),
    [(0, 0, ""), (1, 1, ""), (1, 0, "No space left"), (2, 1, "No space left")],
)
def test_a_step_runs_again_once_its_kernels_have_another_folder(
    failures: int, folders: int, error: str
) -> None:
    moves: list[bool] = []

    def move() -> bool:
        moves.append(len(moves) < folders)
        return moves[-1]

    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    with StepThread(FullDisk(failures), lambda: None, move_cache=move) as steps:
        steps.submit(worker_pb2.StepPlan(step_id=7), outcomes.put, lambda: True)
        outcome = outcomes.get(timeout=30)
    result = outcome if isinstance(outcome, worker_pb2.StepResult) else outcome.result()
    assert result.step_id == 7 and error in result.error and bool(error) == bool(result.error)
    assert len(moves) == min(failures, 1)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        with pytest.raises(ConfigError, match="No space left on device"):
            check_folder(tmp_path)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
