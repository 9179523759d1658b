"""Queries over the metrics table, and the rows and panels of a dashboard that they are put into.

Names and labels are looked up in the table, so that a panel of a metric that was renamed is an error here and not an
empty panel somewhere else.
"""

from __future__ import annotations

from typing import NamedTuple

from kvbm.observe.metric_kinds import MetricKind
from kvbm.observe.metric_table import BY_NAME

WINDOW = "$__rate_interval"
"""Grafana's: long enough for a rate at any resolution."""
CHOSEN = '{job=~"$job",instance=~"$instance"}'
"""The managers that were chosen at the top of the dashboard."""


class Query(NamedTuple):
    """One line or more of a panel: PromQL, and the name of each line, with labels in double braces."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A time series. `unit` is one of Grafana's units. `help` says what to conclude from it."""

    title: str
    unit: str
    help: str
    queries: tuple[Query, ...]


class Row(NamedTuple):
    """Panels below a title."""

    title: str
    panels: tuple[Panel, ...]


def plain(name: str, legend: str = "", by: tuple[str, ...] = ()) -> Query:
    """A value as it is, summed over the managers."""
    return Query(f"sum{_by(name, by)}({name}{CHOSEN})", legend or _legend(by))


def worst(name: str, by: tuple[str, ...]) -> Query:
    """The largest value among the managers."""
    return Query(f"max{_by(name, by)}({name}{CHOSEN})", _legend(by))


def rate(name: str, legend: str = "", by: tuple[str, ...] = ()) -> Query:
    """A counter's growth a second."""
    assert BY_NAME[name].kind is MetricKind.COUNTER, name
    return Query(f"sum{_by(name, by)}(rate({name}{CHOSEN}[{WINDOW}]))", legend or _legend(by))


def quantile(name: str, share: float, by: tuple[str, ...], what: str = "") -> Query:
    """A quantile of a histogram; `what` tells those of one panel apart."""
    assert BY_NAME[name].kind is MetricKind.HISTOGRAM, name
    buckets = f"sum by ({', '.join(('le', *by))}) (rate({name}_bucket{CHOSEN}[{WINDOW}]))"
    words = [f"p{share * 100:g}", _legend(by), what]
    return Query(f"histogram_quantile({share}, {buckets})", " ".join(filter(None, words)))


def ratio(above: str, below: str, legend: str, by: tuple[str, ...] = ()) -> Query:
    """The growth of one counter for each unit of another's."""
    top, bottom = (
        f"sum{_by(name, by if name == above else ())}(rate({name}{CHOSEN}[{WINDOW}]))"
        for name in (above, below)
    )
    return Query(f"{top} / {f'scalar({bottom})' if by else bottom}", legend or _legend(by))


def share(name: str, label: str, value: str, legend: str) -> Query:
    """The part of a counter's growth that one value of a label has."""
    assert value in next(row.values for row in BY_NAME[name].labels if row.name == label), value
    chosen = f'{CHOSEN[:-1]},{label}="{value}"}}'
    part, whole = (f"sum(rate({name}{labels}[{WINDOW}]))" for labels in (chosen, CHOSEN))
    return Query(f"{part} / {whole}", legend)


def _by(name: str, labels: tuple[str, ...]) -> str:
    known = [label.name for label in BY_NAME[name].labels]
    assert set(labels) <= set(known), f"{name} has labels {known}"
    return f" by ({', '.join(labels)}) " if labels else ""


def _legend(labels: tuple[str, ...]) -> str:
    return " → ".join(f"{{{{{label}}}}}" for label in labels)


def original(title: str, name: str, unit: str = "short") -> Panel:
    """A panel of the original's dashboard: its title, and the series as it is."""
    assert BY_NAME[name].compatible
    return Panel(title, unit, BY_NAME[name].help, (Query(f"{name}{CHOSEN}", "{{instance}}"),))
