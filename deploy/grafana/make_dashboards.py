"""Write the Grafana dashboards beside this file from dashboards.toml: make dashboards."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COLUMNS = 24
WIDTH, HEIGHT = 8, 8  # of a panel that does not say so
REPLICAS = 'job=~"$job",instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboards() -> dict[str, dict[str, Any]]:
    """By the names of their files."""
    described = tomllib.loads((FOLDER / "dashboards.toml").read_text())
    return {
        f"stemserve-{name}.json": {
            "uid": f"stemserve-{name}",
            "title": dashboard["title"],
            "tags": ["stemserve"],
            "schemaVersion": 39,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "templating": {"list": list(_variables(dashboard.get("variables", [])))},
            "annotations": {"list": [_restarts()]},
            "links": [
                {
                    "type": "dashboards",
                    "tags": ["stemserve"],
                    "title": "Stemserve",
                    "asDropdown": True,
                }
            ],
            "panels": list(_panels(dashboard["rows"])),
        }
        for name, dashboard in described.items()
    }


def text_of(dashboard: dict[str, Any]) -> str:
    return json.dumps(dashboard, indent=1) + "\n"


def _variables(own: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }
    yield _label_variable("job", "label_values(stemserve_ready, job)")
    yield _label_variable("instance", 'label_values(stemserve_ready{job=~"$job"}, instance)')
    for variable in own:
        value = variable["value"]
        yield {
            "name": variable["name"],
            "type": "textbox",
            "label": variable["label"],
            "query": value,
            "current": {"text": value, "value": value},
        }


def _label_variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _restarts() -> dict[str, Any]:
    restarts = "sum by (instance) (increase(stemserve_worker_restarts_total{$S}[1m])) > 0"
    return {
        "name": "Worker restarts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "orange",
        "expr": _filled(restarts),
        "titleFormat": "worker restarted",
        "textFormat": "{{instance}}",
    }


def _panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for row in rows:
        yield {
            "id": number,
            "type": "row",
            "title": row["title"],
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        number, y, x = number + 1, y + 1, 0
        widths = [panel.get("width", WIDTH) for panel in row["panels"]]
        flat = all(panel.get("kind") == "stat" for panel in row["panels"])
        height = HEIGHT // 2 if flat else HEIGHT
        for panel, width in zip(row["panels"], widths, strict=True):
            if x + width > COLUMNS:
                x, y = 0, y + height
            yield _panel(panel, number, {"x": x, "y": y, "w": width, "h": height})
            number, x = number + 1, x + width
        y += height


def _panel(panel: dict[str, Any], number: int, place: dict[str, int]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    options: dict[str, Any] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    if kind == "stat":
        is_info = "_info{" in panel["show"][0][0]
        mode = "name" if is_info else "value"
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": mode}
    return {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel.get("text", ""),
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel["unit"]}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": _filled(expression),
                "legendFormat": legend,
                "exemplar": panel.get("exemplars", False),
            }
            for index, (expression, legend) in enumerate(panel["show"])
        ],
    }


def _filled(expression: str) -> str:
    return expression.replace("$S", REPLICAS).replace("$R", "$__rate_interval")


def main() -> None:
    for name, dashboard in dashboards().items():
        (FOLDER / name).write_text(text_of(dashboard))


if __name__ == "__main__":
    main()
