"""Writes the metrics as Prometheus text (format 0.0.4).

prometheus_client cannot do this: it appends `_total` to the name of every counter, and the original's names have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvbm.observe.metric_kinds import Metric
from kvbm.observe.metrics import Histogram, Metrics


def render(metrics: Metrics) -> str:
    """One scrape. Any thread."""
    return "".join(f"{line}\n" for line in _lines(metrics))


def _lines(metrics: Metrics) -> Iterator[str]:
    for metric, rows in metrics.series():
        if not rows:
            continue
        yield f"# HELP {metric.name} {_escape_help(metric.help)}"
        yield f"# TYPE {metric.name} {metric.kind.value}"
        for values, series in rows:
            pairs = [
                f'{label.name}="{_escape(value)}"' for label, value in zip(metric.labels, values, strict=True)
            ]
            if isinstance(series, Histogram):
                yield from _histogram_lines(metric, pairs, series)
            else:
                yield f"{metric.name}{_braces(pairs)} {_number(series)}"


def _histogram_lines(metric: Metric, pairs: list[str], histogram: Histogram) -> Iterator[str]:
    # A copy: `_count` must equal the last bucket, although the owner continues to count.
    counts, total = list(histogram.counts), histogram.total
    cumulative = 0
    for bound, count in zip((*histogram.bounds, math.inf), counts, strict=True):
        cumulative += count
        bucket = _braces([*pairs, f'le="{_number(float(bound))}"'])
        yield f"{metric.name}_bucket{bucket} {cumulative}"
    yield f"{metric.name}_sum{_braces(pairs)} {_number(total)}"
    yield f"{metric.name}_count{_braces(pairs)} {cumulative}"


def _braces(pairs: list[str]) -> str:
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escape(text: str) -> str:
    return _escape_help(text).replace('"', '\\"')
