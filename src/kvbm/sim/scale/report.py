"""The rows of a `ScaleStudy` as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvbm.present.tables import plain_table
from kvbm.sim.scale.study import ScaleRow, ScaleStudy

OVERLOAD = 0.95

_HEADINGS = (
    "host\nhits",
    "all\nhits",
    "TTFT\nmean",
    "\np50",
    "\np99",
    "load\noffered",
    "\nleft",
    "busiest\nnode",
    "read\nGB/s",
    "written\nGB/s",
)


def render(study: ScaleStudy, rows: Sequence[ScaleRow]) -> RenderableType:
    """One table, and notes below it."""
    names = ("load", "nodes", "router", "remote")
    table = plain_table((*names, *_HEADINGS), words=names[2:], title=rows[0].trace)
    last = None
    for row in rows:
        if last not in (None, (row.wanted_load, row.nodes)):
            table.add_section()
        last = (row.wanted_load, row.nodes)
        table.add_row(f"{row.wanted_load:g}", f"{row.nodes:,}", row.router, row.remote, *_cells(row))
    kind = "of all nodes together" if study.total_load is not None else "of each node"
    seeds = f"seed {study.seeds[0]}" if len(study.seeds) == 1 else f"seeds {', '.join(map(str, study.seeds))}"
    note = (
        f"{rows[0].measured_s / 60:.3g} minutes after {rows[0].warm_up_s / 60:.3g} of warm-up; load: prefill {kind} if "
        f"nothing was cached; policy {study.policy}; host memory {study.host} and remote {study.remote_size} a node; "
        f"network {study.network_bytes_per_s / 1e9:g} GB/s a node; {seeds}"
    )
    lines: list[RenderableType] = [table, Text(note + "\n", style="dim")]
    asked_s = 60.0 * (study.minutes + study.warm_up_minutes)
    if rows[0].measured_s + rows[0].warm_up_s < asked_s - 1.0:
        lines.append(
            Text(f"the trace is shorter than the {asked_s / 60:g} minutes asked for", style="yellow")
        )
    if not all(row.requests for row in rows):
        lines.append(
            Text("-: no request came in the minutes that count; try more of them (--minutes)", style="yellow")
        )
    if any(row.load > OVERLOAD for row in rows):
        lines.append(Text(f"load left above {OVERLOAD}: those nodes cannot keep up", style="yellow"))
    return Group(*lines)


def _cells(row: ScaleRow) -> list[str]:
    if not row.requests:
        return ["-"] * len(_HEADINGS)
    return [
        f"{row.host_hit_rate:.1%}",
        f"{row.hit_rate:.1%}",
        *(f"{seconds:,.2f}" for seconds in (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p99_s)),
        f"{row.offered_load:.2f}",
        f"{row.load:.2f}",
        f"{row.imbalance:.2f} ×",
        f"{row.read_bytes_per_s / 1e9:.2f}",
        f"{row.written_bytes_per_s / 1e9:.2f}",
    ]
