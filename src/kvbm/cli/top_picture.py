"""A `View` as text for a terminal: the same pieces for the live screen and for `--once`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvbm.block import NO_COUNT
from kvbm.observe.view import FlowView, View
from kvbm.present.numbers import format_bytes, format_ms
from kvbm.present.tables import screen_table, side_by_side
from kvbm.remote_report import RemoteReport

WIDE = 120
"""From so many columns on, engines and prefixes stand beside each other."""
_BAR = 10
_LEVELS = {"fault": ("✗ ", "bold red"), "advice": ("→ ", "yellow"), "normal": ("", "bold")}


def title(view: View, socket_path: str, width: int) -> Text:
    """Which manager this is, and over which window the numbers are."""
    words = (
        f"manager {view.pid} · {view.version} · up {duration(view.uptime_s)} · last {duration(view.window_s)}"
    )
    place = socket_path if len(words) + len(socket_path) + 3 <= width else socket_path.rsplit("/", 1)[-1]
    return Text(f"{words} · {place}", style="dim")


def verdict(view: View) -> Text:
    """The findings, a paragraph each."""
    text = Text()
    for finding in view.findings:
        mark, style = _LEVELS[finding.level]
        text.append(("\n" if text else "") + mark + finding.text, style=style)
    return text


def tiers(view: View) -> RenderableType:
    """Occupancy, leases, hits and evictions of each tier."""
    if not view.tiers:
        return Text("no tier yet: the first engine makes them", style="dim")
    table = screen_table(("tier", "", "used", "of", "leased", "hits", "evicted/s"), spare=("",))
    for tier in view.tiers:
        name = tier.name + ("" if tier.up else " off") + (" (staging)" if tier.staging else "")
        full = round(tier.used_share * _BAR)
        bounded = tier.capacity_blocks != NO_COUNT
        bar = "█" * full + "░" * (_BAR - full) if bounded else ""
        of = f"{format_bytes(tier.capacity_bytes)}, {tier.capacity_blocks:,} blocks"
        known = f"{format_bytes(tier.used_bytes)}, {tier.resident_blocks:,} blocks known"
        table.add_row(
            Text(name, style="" if tier.up else "bold red"),
            Text(bar, style="green" if tier.used_share <= 0.95 else "yellow"),
            f"{tier.used_share:.0%}" if bounded else "-",
            of if bounded else known,
            f"{tier.leased_share:.0%}" if bounded else "-",
            "-" if tier.staging else f"{tier.hit_share:.0%} of asked",
            _rate(tier.evicted_per_s) if bounded else "-",
        )
    return table


def flows(view: View) -> RenderableType:
    """What moves between the tiers, in one row, over the flows' own window; those of remote stores in another one."""
    away = [flow for flow in view.flows if "remote" in (flow.source, flow.target)]
    near = [flow for flow in view.flows if flow not in away]
    return Group(*(_flow_table(part) for part in (near, away) if part))


def _flow_table(part: Sequence[FlowView]) -> RenderableType:
    table = screen_table([f"{flow.source}→{flow.target}" for flow in part], words=0)
    table.add_row(*(f"{flow.bytes_per_s / 1e9:.3f} GB/s" for flow in part))
    table.add_row(*("" if flow.mean_s is None else f"{flow.mean_s * 1e3:,.1f} ms each" for flow in part))
    return table


def stores(view: View) -> Text:
    """A line for each remote store: where it is, how it does, and what it costs."""
    lines = []
    for space in view.spaces:
        for each in space.remotes:
            if each.fleet:
                reached = f"{each.nodes_reached:,} of {each.nodes:,} nodes reached"
                lines.append(f"{each.shown}: {reached}, {each.blocks:,} blocks known")
                continue
            state = (
                "" if each.reading == each.writing == "closed" or not each.reading else " " + _breakers(each)
            )
            asked = " ".join(f"{kind} {count:,}" for kind, count in each.requests.items())
            latency = f" · {format_ms(each.latency_s)}" if each.latency_s else ""
            more = "" if each.complete else " · still being read"
            lines.append(f"store {each.shown}{state}: {asked}{latency}{more}")
    return Text("\n".join(lines))


def _breakers(report: RemoteReport) -> str:
    return f"(reads {report.reading}, writes {report.writing})"


def queues(view: View) -> Text:
    """Queues and leases in one line."""
    queue = view.queues
    store = (
        f", store {queue.remote_onboarding:,} up, {queue.remote_offloading:,} down"
        if any(space.remotes for space in view.spaces)
        else ""
    )
    return Text(
        f"queues: {queue.onboarding:,} blocks up, {queue.offloading:,} down{store} · {queue.leases:,} leases · "
        f"{queue.reservations:,} stores in flight · {view.lookups_per_s:.1f} lookups/s"
    )


def engines(view: View, rows: int) -> RenderableType:
    """The engines that are connected."""
    if not view.engines:
        return Text("no engine is connected", style="dim")
    table = screen_table(("engine", "model", "ranks", "leases", "blocks"))
    for engine in view.engines[:rows]:
        ranks = len(engine.ranks)
        table.add_row(
            _short(engine.engine, 16),
            _short(engine.model, 28),
            Text(f"{ranks}/{engine.rank_count}", style="bold red" if ranks < engine.rank_count else ""),
            f"{engine.leases:,}" if engine.led else "no leader",
            f"{engine.leased_blocks:,}",
        )
    left_out = len(view.engines) - rows
    return Group(table, Text(f"and {left_out} more", style="dim")) if left_out > 0 else table


def prefixes(view: View, rows: int) -> RenderableType:
    """The prefixes that requests share, the hottest first."""
    if not view.prefixes:
        return Text("no two requests have begun with the same block yet", style="dim")
    names = [tier.name for tier in view.tiers]
    table = screen_table(("prefix", "tokens", "requests", "found", "lost", *names), words=1)
    for prefix in view.prefixes[:rows]:
        found = prefix.found_tokens / prefix.asked_tokens if prefix.asked_tokens else 0.0
        table.add_row(
            prefix.name,
            f"{prefix.tokens:,}",
            f"{prefix.requests:,}",
            f"{found:.0%}",
            f"{prefix.lost:,}",
            *(_part(prefix.tiers.get(tier.name, 0), prefix.tokens) for tier in view.tiers),
        )
    return table


def page(view: View, socket_path: str, width: int, rows: int = 12) -> RenderableType:
    """Everything, one below the other, or in two columns where there is room."""
    gap = Text("")
    head = (
        title(view, socket_path, width),
        verdict(view),
        gap,
        tiers(view),
        gap,
        flows(view),
        queues(view),
        *([stores(view)] if any(space.remotes for space in view.spaces) else []),
        gap,
    )
    left, right = engines(view, rows), prefixes(view, rows)
    if width < WIDE:
        return Group(*head, right, gap, left)
    return Group(*head, side_by_side(right, left))


def duration(seconds: float) -> str:
    """A length of time in its largest unit, or two: `42 s`, `3 min`, `2 h 05 min`, `4 d 3 h`."""
    minutes = int(seconds // 60)
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _part(tokens: int, whole: int) -> str:
    return f"{tokens / whole:.0%}" if whole else "-"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[-width + 1 :]}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10.0 or per_s == 0.0 else f"{per_s:.1f}"
