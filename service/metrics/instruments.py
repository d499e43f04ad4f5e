"""Makes Prometheus instruments with all their series, so that rates do not begin with a gap."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from stemserve.service.metrics.labels import OP_PATHS


class _Remembering(MetricWrapperBase):
    """Finds the series of some labels with one look: the library makes texts of them, and takes a
    lock, each time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._known: dict[tuple[object, ...], Self] = {}
        super().__init__(*args, **options)

    def labels(self, *labelvalues: object, **labelkwargs: object) -> Self:
        if labelkwargs:
            return super().labels(*labelvalues, **labelkwargs)
        if (series := self._known.get(labelvalues)) is None:
            series = self._known[labelvalues] = super().labels(*labelvalues)
        return series


class _Counter(_Remembering, Counter):
    pass


class _Histogram(_Remembering, Histogram):
    pass


class BeforeScrape(Collector):
    """Has no metrics: registered first, it brings those of others up to date for each scrape."""

    def __init__(self, update: Callable[[], None]) -> None:
        """`update` is called by the thread that scrapes."""
        self._update = update

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self._update()
        return ()


class Instruments:
    """Of one registry. The help text of each is its line in docs/metrics.md."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, **labels: Sequence[str]) -> Counter:
        counter = _Counter(f"stemserve_{name}", text, [*labels], registry=self._registry)
        _create(counter, labels)
        return counter

    def gauge(self, name: str, text: str, **labels: Sequence[str]) -> Gauge:
        gauge = Gauge(f"stemserve_{name}", text, [*labels], registry=self._registry)
        _create(gauge, labels)
        return gauge

    def computed_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """`value` is asked for by each scrape, on a thread of its own."""
        self.gauge(name, text).set_function(value)

    def info(self, name: str, text: str, labels: str) -> Gauge:
        """Its labels are known later; the value is always 1."""
        return Gauge(f"stemserve_{name}", text, labels.split(), registry=self._registry)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], **labels: Sequence[str]
    ) -> Histogram:
        histogram = _Histogram(
            f"stemserve_{name}", text, [*labels], registry=self._registry, buckets=buckets
        )
        _create(histogram, labels)
        return histogram

    def choice_counter(self, name: str, text: str, **labels: Sequence[str]) -> Counter:
        """By op and path, which do not go together freely."""
        names = ["op", "path", *labels]
        counter = _Counter(f"stemserve_{name}", text, names, registry=self._registry)
        for choice, values in product(OP_PATHS, product(*labels.values())):
            counter.labels(*choice, *values)
        return counter

    def choice_histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = _Histogram(
            f"stemserve_{name}", text, ["op", "path"], registry=self._registry, buckets=buckets
        )
        for choice in OP_PATHS:
            histogram.labels(*choice)
        return histogram


def _create(instrument: Counter | Gauge | Histogram, labels: Mapping[str, Sequence[str]]) -> None:
    if labels:
        for values in product(*labels.values()):
            instrument.labels(*values)
