"""The dashboards are what their description says, and show only what exists."""

import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.expressions import (
    DASHBOARDS,
    ROOT,
    Expression,
    exported,
    filled,
    names,
    panel_expressions,
    panels,
    recorded,
    unknown_matchers,
)


def test_the_files_are_what_make_dashboards_writes() -> None:
    made: dict[str, Any] = runpy.run_path(str(ROOT / "deploy/grafana/make_dashboards.py"))
    expected = {name: made["text_of"](board) for name, board in made["dashboards"]().items()}
    found = {file.name: file.read_text() for file in DASHBOARDS}
    assert found == expected, "run make dashboards"


def test_panels_do_not_overlap_and_have_titles_of_their_own() -> None:
    assert len(DASHBOARDS) == 3
    for dashboard in DASHBOARDS:
        shown = panels(dashboard)
        assert len({panel["title"] for panel in shown}) == len(shown)
        taken: set[tuple[int, int]] = set()
        for panel in shown:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24
            taken |= cells


@pytest.mark.parametrize("expression", list(panel_expressions()), ids=lambda e: e.where)
def test_panels_name_only_what_is_exported(expression: Expression) -> None:
    text = filled(expression.text)
    ours = {name for name in names(text) if name.startswith("stemserve")}
    assert ours <= exported() | recorded()
    assert not unknown_matchers(text)
    assert "$" not in text


def test_promtool_parses_every_expression(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": filled(expression.text)}
        for number, expression in enumerate(panel_expressions())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    ran = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
