import io

from kernel_report import report
from kernel_tables import Progress, decode_table, engine_cell, markdown, prefill_table

TREE = {
    "tree": "two levels",
    "requests": 16,
    "share": 13.9,
    "floor_us": 56.6,
    "engines": {
        "codec": {"us": 62.26, "cold_us": 60.0, "error": 3e-4},
        "fa3": {"us": 500.0, "error": 3e-4},
        "xqa": {"wrong": True, "error": 0.5},
        "flex": {"cannot": "too wide"},
    },
    "chosen": "codec",
    "regret": 0.0,
    "predicted_us": {"codec": 60.0, "paged": "refused"},
}
SHAPE = {
    "prefix": 96,
    "item": 4,
    "items": 2,
    "heads": [16, 8, 128],
    "cached": False,
    "grid": True,
    "floor_us": 0.3,
    "flops": 1,
    "chosen": "ragged",
    "regret": 0.05,
    "strategies": {
        "ragged": {"us": 32.0, "graph_us": 21.0, "predicted_us": 30.0, "error": 3e-4},
        "split": {"us": 63.0, "predicted_us": 60.0, "error": 3e-4},
        "custom_mask": {"far_us": 4777.0},
        "multi_item": {"refused": "too long"},
    },
}
EMPTY = {
    "table": [],
    "trees": [],
    "shapes": [],
    "calibration": [],
    "division": [],
    "division_figures": None,
    "plans": [],
    "dram": [],
    "no_dram": None,
    "late": {"trees": 3},
    "strategies": ["codec", "paged"],
    "peers": ["fa3", "xqa", "flex"],
    "missing_peers": {"fasttree": "not given"},
    "summary": {"codec_vs_floor": 1.1, "plan_ms_64": None},
}


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert markdown(["a", "bb"], [["ccc", "d"]]).splitlines() == [
        "| a   | bb |",
        "|-----|----|",
        "| ccc | d  |",
    ]


def test_a_decode_row_has_floor_peers_ours_and_ratios() -> None:
    cells = decode_table([TREE], ["codec"], ["fa3", "xqa", "flex"]).splitlines()[2].split("|")
    assert [cell.strip() for cell in cells[1:-1]] == [
        "two levels", "16", "13.9", "0.057", "**0.500**", "wrong", "cannot", "8.83", "0.062",
        "0.060", "1.10", "8.03",
    ]  # fmt: skip


def test_an_engine_that_was_not_asked_has_a_dash() -> None:
    assert engine_cell(TREE, "fi_decode") == "-"


def test_a_prefill_row_marks_the_best_and_brackets_what_was_not_timed() -> None:
    table = prefill_table([SHAPE], ["custom_mask", "multi_item", "ragged", "split"])
    line = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    assert line == [
        "96 / 4 / 2", "16/8", "no", "-", "(4.777)", "refused", "**0.032**", "0.063", "0.0003",
        "ragged", "0.021", "5.0 %",
    ]  # fmt: skip


def test_a_report_of_nothing_still_says_what_is_missing() -> None:
    text = report(EMPTY)
    assert "fasttree: not given" in text
    assert "3 of trees: no time left" in text
    assert "## Summary" in text
    assert "## Prefill" not in text


def test_a_report_names_every_engine_that_did_not_run() -> None:
    text = report(EMPTY | {"table": [TREE], "shapes": [SHAPE]})
    assert "xqa: wrong, error 5.0e-01 to 5.0e-01 (1 times)" in text
    assert "flex: cannot: too wide (1 times)" in text


def test_progress_is_a_line_at_a_time_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(3, stream)
    progress.step("first")
    progress.step("second")
    progress.close()
    assert stream.getvalue().startswith("[........................] 0/3")
    assert "\r" not in stream.getvalue()
