"""Read a server's metrics, and what they grew by between two readings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.request import urlopen

_SERIES = re.compile(r"^stemserve_(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Every series by its name, without the project's, and its labels."""

    series: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels; 0 where there is none."""
        wanted = set(labels.items())
        return sum(
            value
            for (found, its), value in self.series.items()
            if found == name and wanted <= set(its)
        )

    def since(self, before: "Reading") -> "Reading":
        return Reading(
            series={key: value - before.series.get(key, 0.0) for key, value in self.series.items()}
        )


NOTHING = Reading(series={})


def parse(text: str) -> Reading:
    return Reading(
        series={
            (name, frozenset(_LABEL.findall(labels))): float(value)
            for name, labels, value in _SERIES.findall(text)
        }
    )


def scrape(url: str | None) -> Reading:
    """Nothing without a URL. Raises OSError where nobody answers."""
    if url is None:
        return NOTHING
    with urlopen(url, timeout=30) as answer:
        return parse(answer.read().decode())
