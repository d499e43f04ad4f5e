"""Check what is deployed: the tests of deploy/ and of routing, and one line of JSON about them.

The image for a CPU is built and run where buildah, debootstrap and root are to be had.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = ("tests/deploy/test_*.py", "tests/e2e/test_router.py")
IMAGE = "tests/deploy/image_checks.py"  # its name keeps it out of what is collected by itself
NOT_RUN = {
    "the CUDA image": "needs its base from a registry, and a GPU to run",
    "compose.yaml": "needs a container engine and a registry",
    "the chart in a cluster": "needs a cluster; helm test is for that",
    "the objects of operators": "need LeaderWorkerSet, cert-manager, KEDA and others in a cluster",
    "the dashboards in Grafana": "needs Grafana; Prometheus answers their expressions",
}


class Outcomes:
    """What pytest reports."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: dict[str, str] = {}
        self.measured: dict[str, object] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files.add(report.nodeid.partition("::")[0])
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped[report.nodeid] = _reason(report.longrepr)
        elif report.when == "call":
            self.passed += 1
            self.measured.update(report.user_properties)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def note_silence(self, asked: set[str]) -> None:
        """Of files that were asked for: those of which no test ran."""
        self.failed += [f"{name}: nothing ran" for name in sorted(asked - self.files)]


def _reason(representation: Any) -> str:
    return str(representation[2] if isinstance(representation, tuple) else representation)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-image", action="store_true", help="build none: that takes minutes")
    parser.add_argument("--only-image", action="store_true", help="check nothing else")
    options = parser.parse_args()
    patterns = (() if options.only_image else TESTS) + (() if options.no_image else (IMAGE,))
    outcomes = Outcomes()
    root = Path(__file__).parents[1]
    # Files: pytest leaves out a file whose folder is named too, unless its name is a test's.
    files = sorted(file for pattern in patterns for file in root.glob(pattern))
    code = pytest.main([*map(str, files)], plugins=[outcomes])
    outcomes.note_silence({str(file.relative_to(root)) for file in files})
    line = {
        "passed": outcomes.passed,
        "failed": outcomes.failed,
        "skipped": outcomes.skipped,
        "measured": outcomes.measured,
        "not_run": NOT_RUN | ({IMAGE: "--no-image"} if options.no_image else {}),
    }
    print(json.dumps(line))
    return int(code) or int(bool(outcomes.failed))


if __name__ == "__main__":
    sys.exit(main())
