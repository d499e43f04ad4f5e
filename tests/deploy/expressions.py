"""The expressions of the rules and dashboards, and the series that they name."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from stemserve.service.metrics.page import families, label_values, series_names

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/rules.yaml"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
NAME = re.compile(r"\b(?:stemserve|DCGM|process|kube|certmanager)[_:][a-zA-Z0-9_:]+")
SELECTOR = re.compile(r"\b(stemserve_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|=|!~|!=)\s*"([^"]*)"')
OF_TARGETS = {"namespace", "job", "instance"}  # labels that Prometheus adds


class Expression(NamedTuple):
    where: str
    text: str


def rules() -> list[dict[str, Any]]:
    groups: Any = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def panels(dashboard: Path) -> list[dict[str, Any]]:
    every: Any = json.loads(dashboard.read_text())["panels"]
    return [panel for panel in every if panel["type"] not in ("row", "text")]


def panel_expressions() -> Iterator[Expression]:
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield Expression(f"{dashboard.stem}: {panel['title']}", target["expr"])


def rule_expressions() -> Iterator[Expression]:
    for rule in rules():
        yield Expression(rule.get("alert") or rule["record"], rule["expr"])


def names(expression: str) -> set[str]:
    return set(NAME.findall(expression))


@cache
def exported() -> frozenset[str]:
    return frozenset(_label_values())


@cache
def _label_values() -> dict[str, dict[str, list[str]]]:
    """Of each series, by its name."""
    return {name: label_values(f) for f in families() for name in series_names(f)}


def unknown_matchers(expression: str) -> list[str]:
    """Labels, or values of labels, that no series of the named metric has."""
    by_name = _label_values()
    wrong: list[str] = []
    for name, matchers in SELECTOR.findall(expression):
        values = by_name[name]
        for label, operator, wanted in MATCHER.findall(matchers):
            if label in OF_TARGETS:
                continue
            known = values.get(label)
            parts = wanted.split("|") if operator.endswith("~") else [wanted]
            if label == "le":
                parts = [str(float(part)) for part in parts]
            if known is None or not set(parts) <= set(known):
                wrong.append(f"{name}{{{label}{operator}{wanted!r}}}")
    return wrong


def filled(expression: str, interval: str = "5m") -> str:
    """With what Grafana puts in the place of variables."""
    for variable, value in (
        ("$__rate_interval", interval),
        ("$__range", interval),
        ("$job", ".+"),
        ("$instance", ".+"),
        ("$gpu_price_per_hour", "3"),
        ("$hbm_tb_per_s", "4.8"),
    ):
        expression = expression.replace(variable, value)
    return expression
