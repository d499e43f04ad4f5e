"""Every alert fires when it should, by promtool's own tests, and has its page."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.alert_cases import Case, every_case
from tests.deploy.expressions import (
    ROOT,
    RULES,
    alerts,
    exported,
    names,
    recorded,
    rule_expressions,
    unknown_matchers,
)

from stemserve.service.metrics.labels import RPC

RUNBOOKS = ROOT / "docs/runbooks"
HEADINGS = ["## What it means", "## Look at", "## Do"]


def minutes(time: str) -> int:
    return int(time.removesuffix("m"))


def promtool_test(case: Case, rule: dict[str, Any]) -> dict[str, Any]:
    """The form that promtool reads."""
    fires = {
        "exp_labels": {**rule["labels"], **case.labels},
        "exp_annotations": rule["annotations"],
    }
    return {
        "interval": "1m",
        "input_series": [{"series": s, "values": v} for s, v in case.series.items()],
        "alert_rule_test": [
            {"eval_time": case.quiet, "alertname": rule["alert"], "exp_alerts": []},
            {"eval_time": case.loud, "alertname": rule["alert"], "exp_alerts": [fires]},
        ],
    }


@pytest.mark.parametrize(("days", "every"), [(False, "1m"), (True, "5m")])
def test_every_alert_fires_in_its_case_and_not_before(
    promtool: str, tmp_path: Path, days: bool, every: str
) -> None:
    by_name = {alert["alert"]: alert for alert in alerts()}
    cases = [case for case in every_case() if (minutes(case.loud) > 300) is days]
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": every,
        "tests": [promtool_test(case, by_name[f"Stemserve{case.alert}"]) for case in cases],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps(tests))  # JSON is YAML
    ran = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_has_a_case() -> None:
    cases = [f"Stemserve{case.alert}" for case in every_case()]
    assert sorted(cases) == sorted(alert["alert"] for alert in alerts())


def test_promtool_takes_the_rules(promtool: str) -> None:
    ran = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    named = {alert["alert"] for alert in alerts()}
    assert len(named) >= 25
    assert {page.stem for page in RUNBOOKS.glob("Stemserve*.md")} == named
    index = (RUNBOOKS / "README.md").read_text()
    for alert in alerts():
        name = alert["alert"]
        page = RUNBOOKS / f"{name}.md"
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
        headings = [line for line in page.read_text().splitlines() if line.startswith("## ")]
        assert headings == HEADINGS, name
        severity, summary = alert["labels"]["severity"], alert["annotations"]["summary"]
        assert f"| [{name}]({name}.md) | {severity} | {summary} |" in index


@pytest.mark.parametrize("expression", list(rule_expressions()), ids=lambda e: e.where)
def test_rules_name_only_what_is_exported(expression: Any) -> None:
    ours = {name for name in names(expression.text) if name.startswith("stemserve")}
    assert ours <= exported() | recorded()
    assert not unknown_matchers(expression.text)


def test_the_objective_of_scores_is_a_bound_of_the_histogram() -> None:
    assert 0.25 in RPC
