"""Pictures of dashboards: what is asked of Prometheus, and how numbers and gaps are shown."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from draw_dashboards import DASHBOARDS, UNITS, Source, draw_all, in_unit, legend

Queries = list[dict[str, list[str]]]


@pytest.fixture
def prometheus() -> Iterator[tuple[str, Queries]]:
    """An address that answers each query with one series that has a gap; what it was asked."""
    asked: Queries = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            asked.append(query)
            start, step = float(query["start"][0]), float(query["step"][0])
            values = [[start + step * n, "NaN" if n == 2 else str(n)] for n in range(11) if n != 5]
            found = {"metric": {"method": "score"}, "values": values}
            body = json.dumps({"status": "success", "data": {"result": [found]}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "s", "250 ms"),
        (0.00025, "s", "250 us"),
        (3.0, "s", "3 s"),
        (0.431, "percentunit", "43.1 %"),
        (1_500_000.0, "bytes", "1.5 MB"),
        (12.0, "reqps", "12 calls/s"),
        (0.0, "none", "0"),
        (2_500.0, "none", "2.5 K"),
    ],
)
def test_numbers_are_shown_in_their_unit(value: float, unit: str, text: str) -> None:
    assert in_unit(value, unit) == text


def test_units_and_variables_of_all_dashboards_are_known(prometheus: tuple[str, Queries]) -> None:
    address, asked = prometheus
    for file in DASHBOARDS.glob("*.json"):
        dashboard = json.loads(file.read_text())
        source = Source(address=address, end=1e9, seconds=600.0, scrape_s=5.0)
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "textbox":
                source.texts[variable["name"]] = variable["query"]
        for panel in dashboard["panels"]:
            if panel["type"] == "row":
                continue
            assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
            for target in panel["targets"]:
                list(source.series(target))
    expressions = [query["query"][0] for query in asked]
    assert expressions and not [text for text in expressions if "$" in text]
    assert any("[20s]" in text for text in expressions)  # four scrapes


def test_a_line_has_a_gap_where_prometheus_has_nothing(prometheus: tuple[str, Queries]) -> None:
    source = Source(address=prometheus[0], end=1000.0, seconds=50.0, scrape_s=5.0)
    (series,) = source.series({"expr": "up", "legendFormat": "p50 {{method}}"})
    assert series.name == "p50 score"
    assert series.times[0] == pytest.approx(-50 / 60) and series.times[-1] == 0
    gaps = [number for number, value in enumerate(series.values) if math.isnan(value)]
    assert gaps == [2, 5]


def test_a_legend_leaves_out_labels_that_a_series_lacks() -> None:
    assert legend("{{a}}, {{b}}", {"a": "x"}) == "x, "


def test_pictures_are_drawn(prometheus: tuple[str, Queries], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source = Source(address=prometheus[0], end=1000.0, seconds=50.0, scrape_s=5.0)
    empty = draw_all(source, tmp_path)
    assert all(titles == [] for titles in empty.values())
    for picture in tmp_path.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.glob("*.png"))) == len(list(DASHBOARDS.glob("*.json")))
