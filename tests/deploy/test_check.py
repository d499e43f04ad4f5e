"""What `make deploy-check` asks for and what it cannot run."""

import runpy
from typing import Any

import pytest
from tests.deploy.chart import ROOT

CHECK: dict[str, Any] = runpy.run_path(str(ROOT / "deploy/check.py"))


def test_the_page_says_all_that_is_never_run() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    table = page[page.index("### What has never been run") :]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:] == list(CHECK["NOT_RUN"])


def test_a_file_of_which_nothing_ran_has_failed() -> None:
    outcomes = CHECK["Outcomes"]()
    outcomes.note_silence({"tests/a.py", "tests/b.py"})
    assert outcomes.failed == ["tests/a.py: nothing ran", "tests/b.py: nothing ran"]


@pytest.mark.parametrize("pattern", [*CHECK["TESTS"], CHECK["IMAGE"]])
def test_what_is_asked_for_is_there(pattern: str) -> None:
    assert list(ROOT.glob(pattern))
