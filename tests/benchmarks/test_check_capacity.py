"""What `stemserve capacity` predicts stays near what was measured on an H200."""

import json
import re
from typing import Any

import pytest
from check_capacity import GRAPHS, PAGE, RESULTS, TABLE, compared, graphs, section

ALONE = 0.10  # of a call alone
# Of calls at once, which come in more steps than the fewest, or with a cached prefix.
TOGETHER = 0.15
SHORT_MS = 20.0  # calls of less vary more: one was measured once


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The run whose host the rates are of; another machine's, or a newer server's, differ."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    if found["date"] not in PAGE.read_text():
        pytest.skip("engine.json is of another run: benchmarks/check_capacity.py --write")
    return found


def test_predictions_are_near_what_was_measured(measured: dict[str, Any]) -> None:
    rows = list(compared(measured))
    assert len(rows) == len(measured["rows"])
    for row in rows:
        together = row.row.startswith("score") and not row.row.endswith("/1")
        most = TOGETHER if together else ALONE
        for error in (row.gpu_error, row.whole_error):
            assert error is None or abs(error) < most, row
        if row.cached_error is not None and (row.measured_cached or 0) > SHORT_MS:
            assert abs(row.cached_error) < TOGETHER, row


def test_the_page_shows_them(measured: dict[str, Any]) -> None:
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    assert found[0] == section(measured), "anew: python benchmarks/check_capacity.py --write"


def test_steps_of_a_larger_model_are_near_what_was_measured() -> None:
    errors = [int(found) for found in re.findall(r"\(([+-]\d+)%\)", graphs())]
    assert len(errors) == len(GRAPHS) and max(map(abs, errors)) < 100 * ALONE
