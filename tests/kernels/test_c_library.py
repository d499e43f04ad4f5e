"""Libraries that are compiled at first use: where they are kept, and what is in the way."""

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from stemserve.kernels.c_library import CLibraryError, load_library
from stemserve.kernels.codec.native import SOURCES


def test_the_sources_are_part_of_the_package() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    assert "csrc/**/*" in patterns
    assert all(source.is_file() and source.parent.name == "csrc" for source in SOURCES)


def test_a_library_is_compiled_once_and_shared(tmp_path: Path) -> None:
    load_library(SOURCES, [tmp_path / "cache"])
    made = list((tmp_path / "cache").iterdir())
    load_library(SOURCES, [tmp_path / "cache"])
    assert list((tmp_path / "cache").iterdir()) == made and len(made) == 1


def test_a_folder_that_cannot_be_used_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    load_library(SOURCES, [tmp_path / "file", tmp_path / "cache"])
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for a few names."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_passed_over(full_disk: Path, tmp_path: Path) -> None:
    load_library(SOURCES, [full_disk, tmp_path / "cache"])
    assert list(full_disk.iterdir()) == []
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_disks_that_are_all_full_are_named(full_disk: Path) -> None:
    with pytest.raises(CLibraryError, match=r"writable.*full: .*No space left on device"):
        load_library(SOURCES, [full_disk])


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CLibraryError, match="somebody else"):
        load_library(SOURCES, [tmp_path])


def test_without_a_compiler_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CLibraryError, match="install one"):
        load_library(SOURCES, [tmp_path / "cache"])


def test_a_source_that_does_not_compile_shows_the_compilers_words(tmp_path: Path) -> None:
    (tmp_path / "broken.c").write_text("int f(void) { return x; }\n")
    with pytest.raises(CLibraryError, match="error"):
        load_library([tmp_path / "broken.c"], [tmp_path / "cache"])
    assert list((tmp_path / "cache").iterdir()) == []
