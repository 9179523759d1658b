"""Write `deploy/grafana/kvbm.json`: the Grafana dashboard, from the metrics table (`panels`).

    python scripts/dashboard.py > deploy/grafana/kvbm.json

A test checks that the file is up to date.
"""

from __future__ import annotations

import string
import sys

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from panel_queries import Panel
from panels import ROWS

UID = "kvbm"
PANEL_WIDTH, PANEL_HEIGHT = 6, 8
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def build() -> str:
    """The dashboard as Grafana imports it."""
    board = (
        dashboard.Dashboard("KVBM")
        .uid(UID)
        .description(
            "The KV cache of LLM engines in host memory, on disk and in remote stores: is it working, is it worth it?"
        )
        .tags(["kvbm", "llm"])
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(1)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_choice("job", "label_values(kvbm_engines, job)"))
        .with_variable(_choice("instance", 'label_values(kvbm_engines{job=~"$job"}, instance)'))
    )
    for row in ROWS:
        board = board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board = board.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build())


def _choice(name: str, query: str) -> dashboard.QueryVariable:
    """A list at the top of the dashboard, all of it chosen at first."""
    return (
        dashboard.QueryVariable(name)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _panel(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.help)
        .unit(panel.unit)
        .datasource(DATASOURCE)
        .span(PANEL_WIDTH)
        .height(PANEL_HEIGHT)
        .min(0)
    )
    for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query.expression).legend_format(query.legend)
        made = made.with_target(target)
    return made


if __name__ == "__main__":
    sys.stdout.write(build() + "\n")
