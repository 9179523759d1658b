"""Writes the metrics page of the docs from the table.

`python -m kvbm.observe.reference > docs/reference/metrics.md` writes it; a test checks that it is up to date.
"""

from __future__ import annotations

import sys

from kvbm.observe.metric_kinds import Label, Metric
from kvbm.observe.metric_table import TABLE
from kvbm.settings import variable

_HEAD = f"""\
# Metrics

<!-- Generated from the metrics table by `python -m kvbm.observe.reference`; do not edit by hand. -->

`{variable("metrics")}=true` serves these on port 6880 of all addresses of the machine, at `/metrics`; any other path
is answered with 404. `{variable("metrics_host")}` and `{variable("metrics_port")}` set another address and port.
Sizes are bytes, times are seconds. Counters rise when the work has succeeded, not when it begins.

A page counts all that engines had done when it was asked for, and its gauges are of that moment: whoever reads it after
a reply finds that request in it. An engine copies the last blocks of a request when its reply is on its way, so a page
waits for stores under way, for 0.25 seconds at most.
"""

_COMPATIBLE = """
## Names of the original

The 13 series of NVIDIA Dynamo's KVBM, with its names and without labels, so that existing dashboards continue to
work. In these names `h2d` means host to disk under *offload* and host to device under *onboard*; the new
series name both tiers in labels. `kvbm_matched_tokens` counts the tokens of blocks whose load was begun, whether or
not they reached the device.

| Name | Type | Meaning |
| --- | --- | --- |
"""

_NEW = """
## New series

| Name | Type | Labels | Meaning |
| --- | --- | --- | --- |
"""

_LABELS = """
## Labels

Labels have a fixed set of values; keys, requests and addresses are never among them. Only `engine` has values that
depend on what is connected: model and data-parallel rank, with `#2`, `#3`, … where several engines serve the same, and
`other` for those beyond the first 64 names. An engine that starts again continues its series.

| Series | Label | Values |
| --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    compatible = "".join(
        f"| `{metric.name}` | {metric.kind.value} | {metric.help} |\n"
        for metric in TABLE
        if metric.compatible
    )
    new = [metric for metric in TABLE if not metric.compatible]
    return (
        _HEAD
        + _COMPATIBLE
        + compatible
        + _NEW
        + "".join(map(_row, new))
        + _LABELS
        + "".join(map(_label_rows, new))
    )


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label.name}`" for label in metric.labels) or "none"
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |\n"


def _label_rows(metric: Metric) -> str:
    return "".join(f"| `{metric.name}` | `{label.name}` | {_values(label)} |\n" for label in metric.labels)


def _values(label: Label) -> str:
    listed = ", ".join(f"`{value}`" for value in label.values)
    return f"`MODEL/dpRANK`, {listed}" if label.open else listed


if __name__ == "__main__":
    sys.stdout.write(page())
