"""Check what is deployed: the tests of deploy/ and of routing, and one line of JSON about them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = ("tests/deploy", "tests/e2e/test_router.py")
NOT_RUN = {
    "building and running the images": "needs a container engine and a registry",
    "compose.yaml": "the same",
    "the chart in a cluster": "needs a cluster; helm test is for that",
    "the dashboards in Grafana": "needs Grafana; Prometheus answers their expressions",
}


class Outcomes:
    """What pytest reports."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped[report.nodeid] = _reason(report.longrepr)
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _reason(representation: Any) -> str:
    return str(representation[2] if isinstance(representation, tuple) else representation)


def main() -> int:
    outcomes = Outcomes()
    root = Path(__file__).parents[1]
    code = pytest.main([*(str(root / name) for name in TESTS)], plugins=[outcomes])
    line = {
        "passed": outcomes.passed,
        "failed": outcomes.failed,
        "skipped": outcomes.skipped,
        "not_run": NOT_RUN,
    }
    print(json.dumps(line))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
