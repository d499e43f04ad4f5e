"""Folders that cannot keep what is compiled are named when a worker starts."""

import subprocess
from pathlib import Path

import pytest

from stemserve.worker.config import ConfigError
from stemserve.worker.jit_cache import check_folder, check_triton_cache


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
