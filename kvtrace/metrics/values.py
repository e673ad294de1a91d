"""The values of all metrics at this moment, and how Prometheus's client reads them.

Own storage, since the labels that every series bears (model, connector) become known while the recording runs; the
exposition itself is the client library's.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvtrace.metrics.names import COMMON, ENGINES_MOST, METRICS, OTHER, Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import Metric as Family

Labels = tuple[str, ...]

_ENGINE_LABELS = frozenset(("engine", "prefill", "decode"))


class _Histogram:
    """How often a value fell into each bucket, and the sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * (buckets + 1)
        self.sum = 0.0


class Values(Collector):
    """Every metric's series. Any thread may call any method."""

    def __init__(self, common: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._common = dict(common)
        self._numbers: dict[str, dict[Labels, float]] = {metric.name: {} for metric in METRICS}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {
            metric.name: {} for metric in METRICS if metric.kind is Kind.HISTOGRAM
        }
        self._engines: dict[str, str] = {"": ""}
        for metric in METRICS:
            # A series that is there from the start is zero, and not missing, until something happens.
            if not metric.labels and metric.kind is Kind.COUNTER:
                self._numbers[metric.name][()] = 0.0

    def state_common(self, common: Mapping[str, str]) -> None:
        """Set the labels that every series bears."""
        with self._lock:
            self._common.update(common)

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Add to a counter, or to a gauge."""
        with self._lock:
            series = self._numbers[metric.name]
            key = self._key(metric, labels)
            series[key] = series.get(key, 0.0) + amount

    def begin(self, metric: Metric, *labels: str) -> None:
        """Show a series as 0 unless it is there: of one that is first seen at 1 Prometheus cannot tell that it grew."""
        with self._lock:
            self._numbers[metric.name].setdefault(self._key(metric, labels), 0.0)

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge, or a counter that is counted elsewhere."""
        with self._lock:
            self._numbers[metric.name][self._key(metric, labels)] = value

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Put one value into a histogram."""
        with self._lock:
            series = self._histograms[metric.name]
            key = self._key(metric, labels)
            histogram = series.get(key)
            if histogram is None:
                histogram = series[key] = _Histogram(len(metric.buckets))
            histogram.counts[bisect_left(metric.buckets, value)] += 1
            histogram.sum += value

    def _key(self, metric: Metric, labels: Labels) -> Labels:
        """Return the labels with engines beyond the cap taken together."""
        assert len(labels) == len(metric.labels), metric.name  # noqa: S101 -- the table says which labels there are
        return tuple(
            self._engine(value) if name in _ENGINE_LABELS else value
            for name, value in zip(metric.labels, labels, strict=True)
        )

    def _engine(self, engine: str) -> str:
        if engine not in self._engines:
            if len(self._engines) > ENGINES_MOST:
                return OTHER
            self._engines[engine] = engine
        return engine

    # What the client library asks for ----------------------------------------------------------------

    def describe(self) -> Iterable[Family]:
        """Return nothing: the registry is this collector's own, so no names can collide."""
        return []

    def collect(self) -> Iterable[Family]:
        """Return every metric with its present series."""
        with self._lock:
            return [self._family(metric) for metric in METRICS]

    def _family(self, metric: Metric) -> Family:
        names = (*COMMON, *metric.labels)
        common = tuple(self._common.get(name, "") for name in COMMON)
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.doc, labels=names)
            for key, found in self._histograms[metric.name].items():
                histogram.add_metric([*common, *key], _cumulative(metric.buckets, found.counts), found.sum)
            return histogram
        family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        made = family(metric.name, metric.doc, labels=names)
        for key, value in self._numbers[metric.name].items():
            made.add_metric([*common, *key], value)
        return made


def _cumulative(buckets: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    total, found = 0, []
    for bound, count in zip((*buckets, float("inf")), counts, strict=True):
        total += count
        found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return found
