"""The map in docs/architecture.md is that of the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
NAMED = re.compile(r"`([\w./-]+\.(?:py|c|cu|proto))`")


def test_every_file_that_is_named_is_there() -> None:
    files = [
        f"/{file.relative_to(ROOT)}"
        for folder in ("benchmarks", "kernels", "proto", "service", "tests", "worker")
        for file in (ROOT / folder).rglob("*")
    ]
    named = set(NAMED.findall(PAGE))
    assert named
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


@pytest.mark.parametrize("folder", ["kernels", "service", "worker"])
def test_every_folder_has_its_line(folder: str) -> None:
    inner = {
        file.parent.name for file in (ROOT / folder).glob("*/*") if file.parent.name[0].isalpha()
    }
    assert inner
    assert {name for name in inner if f"`{name}`" not in PAGE} == set()
