"""The code is importable under `stemserve` only."""

import importlib.util

import pytest


@pytest.mark.parametrize("folder", ["proto", "service", "kernels", "worker"])
def test_top_level_folders_are_not_importable_by_bare_name(folder: str) -> None:
    spec = importlib.util.find_spec(folder)
    origin = (spec.origin or "") if spec else ""
    assert "site-packages" in origin or spec is None, (
        f"`import {folder}` finds {origin or spec}: the repo root is on sys.path; "
        "run `pytest`, not `python -m pytest`, or set PYTHONSAFEPATH=1"
    )
