"""The numbers behind the table of metrics.

Only one thread changes the numbers, without a lock. The exporter's threads only read; they may see one metric a moment
newer than another.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from kvbm.observe.metric_kinds import Metric, MetricKind
from kvbm.observe.metric_table import BY_NAME, CACHE_TIERS, TABLE, TIER_LABEL, TIERS


class Histogram:
    """How many observations fell into each bucket, and their sum.

    `counts` has one number for each bound, and one for the values above the last bound. They are not cumulative.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation. A value equal to a bound is counted below it."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


Labels = tuple[str, ...]
"""The values of a series' labels, in the table's order."""

Snapshot = Mapping[tuple[str, ...], float]
"""Values by (metric name, label values in the table's order); a histogram counts its observations."""


class Metrics:
    """The numbers behind the table. One thread changes them; any thread may read them.

    An unknown name, label or label value is an error of the programmer: an `AssertionError`.
    """

    def __init__(self, tiers: Collection[str] = CACHE_TIERS) -> None:
        """`tiers` are those that keep blocks here: a counter of another has no series until it counts something."""
        self._absent = frozenset(TIERS) - set(tiers)
        self._series: dict[str, dict[Labels, float | Histogram]] = {metric.name: {} for metric in TABLE}
        for metric in TABLE:
            if metric.at_zero or metric.compatible:
                every = itertools.product(*(label.values for label in metric.labels))
                here = [values for values in every if not self._of_absent_tier(metric, values)]
                self._series[metric.name].update(dict.fromkeys(here, 0))

    def add(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Add `value`, which must not be negative, to a counter."""
        assert value >= 0
        rows, values = self._find(name, MetricKind.COUNTER, labels)
        if value or not self._of_absent_tier(BY_NAME[name], values):
            rows[values] = _number(rows.get(values)) + value

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge to `value`."""
        rows, values = self._find(name, MetricKind.GAUGE, labels)
        rows[values] = value

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Count one observation of a histogram."""
        rows, values = self._find(name, MetricKind.HISTOGRAM, labels)
        series = rows.get(values)
        if not isinstance(series, Histogram):
            series = rows[values] = Histogram(BY_NAME[name].buckets)
        series.observe(value)

    def value(self, name: str, /, **labels: str) -> float:
        """The value of one series (of a histogram: the number of observations); 0 if nothing was counted yet."""
        rows, values = self._find(name, None, labels)
        return _number(rows.get(values))

    def series(self) -> Iterator[tuple[Metric, list[tuple[Labels, float | Histogram]]]]:
        """Each metric with its label values and numbers, in the table's order. Any thread."""
        for metric in TABLE:
            # One call in C makes the copy, so a series that the owner adds cannot change the dict meanwhile.
            yield metric, list(self._series[metric.name].items())

    def snapshot(self) -> Snapshot:
        """All values at this moment, to compare them with a later snapshot. Any thread."""
        return {
            (metric.name, *values): _number(number)
            for metric, rows in self.series()
            for values, number in rows
        }

    def _of_absent_tier(self, metric: Metric, values: Labels) -> bool:
        return metric.only_of in self._absent or any(
            label.name == TIER_LABEL and value in self._absent
            for label, value in zip(metric.labels, values, strict=True)
        )

    def _find(
        self, name: str, kind: MetricKind | None, labels: Mapping[str, str]
    ) -> tuple[dict[Labels, float | Histogram], Labels]:
        """All series of a metric, and the label values that name one of them."""
        metric = BY_NAME.get(name)
        assert metric is not None, f"no metric is called {name}"
        assert kind is None or metric.kind is kind, f"{name} is a {metric.kind.value}"
        return self._series[name], _label_values(metric, labels)


def _number(series: float | Histogram | None) -> float:
    if isinstance(series, Histogram):
        return sum(series.counts)
    return series or 0


def _label_values(metric: Metric, labels: Mapping[str, str]) -> tuple[str, ...]:
    assert len(labels) == len(metric.labels), (
        f"{metric.name} has labels {[row.name for row in metric.labels]}"
    )
    values: list[str] = []
    for label in metric.labels:
        value = labels.get(label.name)
        known = bool(value) if label.open else value in label.values
        assert value and known, f"{metric.name}: {label.name}={value!r} is not one of {label.values}"
        values.append(value)
    return tuple(values)
