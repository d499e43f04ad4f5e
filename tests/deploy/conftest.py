"""Prometheus and promtool: those that `make prometheus` fetched, or the machine's."""

import shutil
from pathlib import Path

import pytest

FETCHED = Path(__file__).resolve().parents[2] / ".cache/prometheus"


@pytest.fixture(scope="session")
def promtool() -> str:
    return _program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _program("prometheus")


def _program(name: str) -> str:
    fetched = FETCHED / name
    found = str(fetched) if fetched.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: `make prometheus` could not fetch Debian's package")
    return found
