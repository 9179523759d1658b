"""What a row of the table of metrics says of one: its kind, its labels and its help."""

from __future__ import annotations

import enum

import msgspec


class MetricKind(enum.Enum):
    """The types of Prometheus; the value is the type's word in the exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Label(msgspec.Struct, frozen=True):
    """A label and all its values. Labels are bounded: keys, request ids and addresses are never among them.

    An `open` one has values besides that depend on who is connected; whoever gives them keeps them few.
    """

    name: str
    values: tuple[str, ...]
    open: bool = False


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    `compatible` marks a series of the original, with its exact name and no labels. `at_zero` counters are exported from
    the start with every combination of label values, so that a rate includes the first event; of tiers, with those that
    the manager has, and those that are `only_of` one tier where it has that.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    compatible: bool = False
    at_zero: bool = False
    only_of: str = ""
