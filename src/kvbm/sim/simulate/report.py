"""The rows of a study as tables."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from kvbm.present.numbers import column_bytes, format_seconds
from kvbm.present.tables import plain_table, title_line
from kvbm.sim.replay import optimum
from kvbm.sim.serving.hybrid import HybridModel
from kvbm.sim.simulate.study import HitRow, TimeRow, averaged, label, spread
from kvbm.sim.traces.trace import Trace

SECONDS_PER_HOUR = 3600.0


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The trace that was replayed. `repeated_rate`: the share of blocks asked for before, which no cache can exceed.

    Of a model with several groups `block_bytes` is that of a block of one of them, and `everything_bytes` what all
    different blocks take in all layers; else the two say the same of whole blocks.
    """

    name: str
    path: str
    seed: int
    requests: int
    block_tokens: int
    accesses: int
    unique_blocks: int
    repeated_rate: float
    seconds: float
    block_bytes: int | None = None
    everything_bytes: int | None = None
    model: str = ""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """LRU at all sizes of a trace: points of (blocks, hit rate)."""

    trace: str
    seed: int
    points: Sequence[tuple[int, float]]


class Document(msgspec.Struct, kw_only=True):
    """All results of one call, as `--json` writes them."""

    settings: dict[str, object]
    traces: list[TraceFacts] = msgspec.field(default_factory=list)
    hit_rates: list[HitRow] = msgspec.field(default_factory=list)
    times: list[TimeRow] = msgspec.field(default_factory=list)
    lru_curves: list[Curve] = msgspec.field(default_factory=list)


def facts(
    trace: Trace, path: str, seed: int, bytes_per_token: int | None, model: HybridModel | None = None
) -> TraceFacts:
    """The facts of one trace as it was read."""
    block_bytes = whole_bytes = bytes_per_token * trace.block_tokens if bytes_per_token else None
    if model is not None:
        slots = model.slots(trace.block_tokens)
        block_bytes, whole_bytes = slots.slot_bytes, slots.everything_bytes
    return TraceFacts(
        name=trace.name,
        path=path,
        seed=seed,
        requests=len(trace.requests),
        block_tokens=trace.block_tokens,
        accesses=trace.accesses,
        unique_blocks=trace.unique_blocks,
        repeated_rate=1.0 - trace.unique_blocks / trace.accesses,
        seconds=trace.seconds,
        block_bytes=block_bytes,
        everything_bytes=trace.unique_blocks * whole_bytes if whole_bytes else None,
        model=model.name if model is not None else "",
    )


def render(document: Document, with_curves: bool) -> RenderableType:
    """A table for each trace, with means over all seeds, and notes below it."""
    tables: list[RenderableType] = []
    for name in dict.fromkeys(trace.name for trace in document.traces):
        found = [trace for trace in document.traces if trace.name == name]
        if hits := [row for row in document.hit_rates if row.trace == name]:
            tables.append(_hits(found, hits))
        if times := [row for row in document.times if row.trace == name]:
            tables.append(_times(found, times))
        curves = [curve for curve in document.lru_curves if curve.trace == name]
        if curves and with_curves:
            tables.append(_curve(found, curves[0]))
    return Group(*tables)


def _hits(traces: Sequence[TraceFacts], rows: Sequence[HitRow]) -> RenderableType:
    several, sampled = len(traces) > 1, rows[0].sampling_error is not None
    gaps = any(row.gap_closed is not None for row in rows)
    columns = {
        "size": True,
        "slots" if traces[0].model else "blocks": True,
        "bytes": traces[0].block_bytes,
        "policy": True,
        "hit rate": True,
        "± seeds": several,
        "LRU is off by": sampled,
        "of LRU → optimum": gaps,
        "M blocks/s": True,
    }
    headings = [heading for heading, wanted in columns.items() if wanted]
    table = plain_table(headings, words={"size", "policy"}, spare=("M blocks/s",))
    size = ""
    for row in sorted(averaged(rows), key=lambda row: row.blocks):
        if size and row.size != size:
            table.add_section()
        cells = [row.size, f"{row.blocks:,}"] if row.size != size else ["", ""]
        if traces[0].block_bytes:
            cells.append(column_bytes(row.blocks * traces[0].block_bytes) if row.size != size else "")
        cells += [label(row), f"{row.hit_rate:.2%}"]
        if several:
            cells.append(f"± {spread(rows, row):.2%}")
        if sampled:
            cells.append(f"{row.sampling_error or 0.0:+.2%}")
        if gaps:
            cells.append("" if row.gap_closed is None else f"{row.gap_closed:.1%}")
        cells.append(f"{row.accesses_per_s / 1e6:.2f}")
        table.add_row(*cells, style="dim" if row.policy == optimum.NAME else None)
        size = row.size
    return Group(title_line(traces[0].name), table, _note(traces))


def _times(traces: Sequence[TraceFacts], rows: Sequence[TimeRow]) -> RenderableType:
    names = ["host", "disk", "policy"]
    headings = [
        "host\nhits",
        "disk\nhits",
        "TTFT, s\nmean",
        "\np50",
        "\np90",
        "\np99",
        "sooner\n(mean)",
        "load",
    ]
    headings += ["written\nto disk", "per byte\nhit"] if any(row.disk_blocks for row in rows) else []
    table = plain_table([*names, *headings], words=names)
    means = averaged(rows)
    without_s = next((row.ttft_mean_s for row in means if not row.host_blocks), None)
    for row in means:
        cells = [row.host or "no cache", row.disk or "-", label(row) or "-"]
        cells += [f"{row.host_hit_rate:.1%}", f"{row.disk_hit_rate:.1%}"]
        cells += map(format_seconds, (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s))
        cells.append(f"{without_s / row.ttft_mean_s:.2f} ×" if without_s and row.ttft_mean_s else "")
        cells.append(f"{row.load:.2f}")
        if len(headings) > 8:
            cells.append(column_bytes(row.disk_written_bytes) if row.disk_blocks else "")
            cells.append("" if row.written_per_hit is None else f"{row.written_per_hit:.2f}")
        table.add_row(*cells)
    lines = [_note(traces)]
    if any(row.load > 1.0 for row in means):
        note = "load above 1: the engine cannot keep up with the trace; try --time-scale or --prefill-tokens-per-s"
        lines.append(Text(note, style="yellow"))
    return Group(title_line(f"{traces[0].name}, served"), table, *lines)


def _curve(traces: Sequence[TraceFacts], curve: Curve) -> RenderableType:
    sized = ["bytes"] if traces[0].block_bytes else []
    table = plain_table(["blocks", "of all", *sized, "hit rate"])
    for blocks, hit_rate in curve.points[:: max(1, len(curve.points) // 16)]:
        cells = [f"{blocks:,}", f"{blocks / traces[0].unique_blocks:.2%}"]
        if traces[0].block_bytes:
            cells.append(column_bytes(blocks * traces[0].block_bytes))
        table.add_row(*cells, f"{hit_rate:.2%}")
    return Group(title_line(f"{traces[0].name}: LRU at all sizes, exactly"), table)


def _note(traces: Sequence[TraceFacts]) -> Text:
    trace = traces[0]
    hours = trace.seconds / SECONDS_PER_HOUR
    text = (
        f"{trace.requests:,} requests in {hours:,.1f} h ask for {trace.accesses:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.unique_blocks:,} of them different: no cache can hit more than "
        f"{trace.repeated_rate:.2%}"
    )
    if trace.model:
        text += (
            f"; {trace.model}: a slot is a block of one of its groups, and everything that was asked for takes "
            f"{column_bytes(trace.everything_bytes or 0)} in all layers"
        )
    if len(traces) > 1:
        text += f"; means over seeds {', '.join(str(trace.seed) for trace in traces)}"
    return Text(text + "\n", style="dim")
