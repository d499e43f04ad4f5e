"""What `stemserve capacity` predicts stays near what was measured on an H200."""

import json
from pathlib import Path

from check_capacity import RESULTS, compared, table

PAGE = Path(__file__).parents[2] / "docs/capacity.md"
ALONE = 0.10  # of a call alone, and of the GPU's time
TOGETHER = 0.15  # of calls at once, or with a cached prefix
SHORT_MS = 20.0  # calls of less vary more: one was measured once


def test_predictions_are_near_what_was_measured() -> None:
    rows = list(compared(json.loads(RESULTS.read_text())))
    assert len(rows) == 10
    for row in rows:
        alone = row.row.endswith("/1")
        assert row.gpu_error is None or abs(row.gpu_error) < ALONE, row
        if row.whole_error is not None:
            assert abs(row.whole_error) < (ALONE if alone else TOGETHER), row
        if row.cached_error is not None and (row.measured_cached or 0) > SHORT_MS:
            assert abs(row.cached_error) < TOGETHER, row


def test_the_page_shows_them() -> None:
    rows = list(compared(json.loads(RESULTS.read_text())))
    assert table(rows) in PAGE.read_text()
