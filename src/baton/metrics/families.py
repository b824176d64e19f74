"""Metric families: each is declared once, with its unit and the values of its labels, and `docs/metrics.md` lists them.

Series are counted without a lock: one thread adds to a series, and any thread may read it. Label values that a
declaration does not list are counted as `other`, so that no client can add series.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

OTHER = "other"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Label(msgspec.Struct, frozen=True):
    """A label: either all its values, or where they come from, which must be something that an operator bounds."""

    name: str
    values: tuple[str, ...] = ()
    source: str = ""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric as queries name it. `processes` are those that have it: workers by role, router, frontend."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    processes: tuple[str, ...]
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()


class Value:
    """One series of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.value += amount

    def set(self, value: float) -> None:
        """Set a gauge."""
        self.value = value


class Distribution:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, amount: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, amount)] += 1
        self.total += amount

    def add(self, amounts: Iterable[float]) -> None:
        """Count many observations."""
        for amount in amounts:
            self.counts[bisect_left(self.bounds, amount)] += 1
            self.total += amount


class _LabelValues:
    """The label values that a family allows."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._allowed = [frozenset(label.values) for label in family.labels]

    def bounded(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Return `values` with `other` for those that the family does not list."""
        if len(values) != len(self._allowed):
            raise ValueError(f"{self._family.name} has {len(self._allowed)} labels")
        return tuple(
            value if not allowed or value in allowed else OTHER
            for value, allowed in zip(values, self._allowed, strict=True)
        )


class Counted(Collector):
    """A counter or a gauge."""

    def __init__(self, family: Family, registry: CollectorRegistry) -> None:
        self._values: dict[tuple[str, ...], Value] = {}
        self._read: Callable[[], float] | None = None
        self._family = family
        self._label_values = _LabelValues(family)
        registry.register(self)
        if not family.labels:
            self.labels()

    def labels(self, *values: str) -> Value:
        """Return the series of these label values. Keep it where it is used often."""
        found = self._values.get(values)
        if found is None:
            bounded = self._label_values.bounded(values)
            found = self._values.setdefault(bounded, Value())
        return found

    def inc(self, amount: float = 1.0) -> None:
        """Add to a family without labels."""
        self._values[()].inc(amount)

    def set(self, value: float) -> None:
        """Set a family without labels."""
        self._values[()].set(value)

    def read(self, value: Callable[[], float]) -> None:
        """Take the value of a family without labels from `value` at each scrape."""
        self._read = value

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        if self._read is not None:
            self._values[()].value = self._read()
        samples = [(labels, series.value) for labels, series in tuple(self._values.items())]
        yield metric_of(self._family, samples)


class Observed(Collector):
    """A histogram. With `read`, its series are read when they are scraped."""

    def __init__(
        self,
        family: Family,
        registry: CollectorRegistry,
        read: Callable[[], Iterable[tuple[tuple[str, ...], Distribution]]] | None = None,
    ) -> None:
        self._distributions: dict[tuple[str, ...], Distribution] = {}
        self._read = read
        self._family = family
        self._label_values = _LabelValues(family)
        registry.register(self)
        if not family.labels:
            self.labels()

    def labels(self, *values: str) -> Distribution:
        """Return the series of these label values. Keep it where it is used often."""
        found = self._distributions.get(values)
        if found is None:
            bounded = self._label_values.bounded(values)
            found = self._distributions.setdefault(bounded, Distribution(self._family.buckets))
        return found

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        names = [label.name for label in self._family.labels]
        metric = HistogramMetricFamily(self._family.name, self._family.meaning, labels=names)
        for labels, series in tuple(self._distributions.items()) if self._read is None else self._read():
            metric.add_metric(labels, _cumulative(series), series.total)
        yield metric


def _cumulative(series: Distribution) -> list[tuple[str, float]]:
    buckets = []
    count = 0
    for bound, number in zip((*map(repr, series.bounds), "+Inf"), tuple(series.counts), strict=True):
        count += number
        buckets.append((bound, float(count)))
    return buckets


class Scraped(Collector):
    """A counter or a gauge whose series are read when they are scraped."""

    def __init__(
        self,
        family: Family,
        registry: CollectorRegistry,
        read: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
    ) -> None:
        self._read = read
        self._family = family
        self._label_values = _LabelValues(family)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield metric_of(self._family, [(self._label_values.bounded(labels), value) for labels, value in self._read()])


def metric_of(family: Family, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """Return the samples of a counter or a gauge as the library takes them."""
    names = [label.name for label in family.labels]
    metric: CounterMetricFamily | GaugeMetricFamily
    if family.kind == "counter":
        metric = CounterMetricFamily(family.name.removesuffix("_total"), family.meaning, labels=names)
    else:
        metric = GaugeMetricFamily(family.name, family.meaning, labels=names)
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric
