"""Shows the answers of `kvbm plan` as tables: what each cost buys, the cheapest sizes, and the assumptions."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from kvbm.present.numbers import format_bytes, format_seconds
from kvbm.present.tables import plain_table, title_line
from kvbm.settings import Settings, variable
from kvbm.settings.parse import GB
from kvbm.sim.plan.cheapest import DOLLARS, Candidate, Prices, frontier
from kvbm.sim.plan.planning import Answer, Answers, words_of
from kvbm.sim.serving.disk import DiskRules
from kvbm.sim.simulate.report import SECONDS_PER_HOUR

ALONE, BOTH = "host memory alone", "with a disk"


def kinds(answer: Answer, everything: bool) -> dict[str, list[Candidate]]:
    """The candidates without and with a disk, by cost. Unless `everything`, those that others of their kind beat are
    left out: others that do better for no more money. No cache is of the first kind.
    """
    found: dict[str, list[Candidate]] = {}
    for kind in (ALONE, BOTH):
        rows = [row for row in answer.candidates if bool(row.disk_bytes) == (kind == BOTH)]
        sign = 1.0 if answer.target.most_s is not None else -1.0
        kept = frontier([(row.cost, sign * answer.target.measure(row)) for row in rows])
        found[kind] = rows if everything else [rows[i] for i in kept]
    return {kind: rows for kind, rows in found.items() if rows}


def render(answers: Answers, everything: bool) -> RenderableType:
    """A table for each trace, the cheapest sizes that meet the target, and the assumptions."""
    parts: list[RenderableType] = []
    for answer in answers.plans:
        parts += [_title(answer), _table(answer, everything), *_conclusion(answer), *_notes(answer), Text("")]
    return Group(*parts)


def target_words(answer: Answer) -> str:
    """The target in words."""
    target = answer.target
    if target.most_s is not None:
        return f"TTFT {target.statistic} of at most {target.most_s:g} s"
    return f"a hit rate of at least {target.least_hit_rate or 0.0:.4g}"


def _title(answer: Answer) -> Text:
    return title_line(f"{answer.trace.name}, {answer.policy}: {target_words(answer)}")


def _table(answer: Answer, everything: bool) -> RenderableType:
    timed = answer.target.most_s is not None
    headings = ["host", "disk", answer.prices.unit, "hits"]
    if timed:
        headings += ["of disk", "TTFT, s\nmean", "\np50", "\np90", "\np99", "load", "written\na day"]
    table = plain_table([*headings, "meets"], words={"meets"})
    for rows in kinds(answer, everything).values():
        for row in rows:
            cells = [_host(row), format_bytes(row.disk_bytes) if row.disk_bytes else "-"]
            cells += [f"{row.cost:,.2f}", f"{row.hit_rate:.1%}"]
            if timed:
                cells.append(f"{row.disk_hit_rate:.1%}" if row.disk_bytes else "-")
                seconds = (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)
                cells += map(format_seconds, seconds)
                cells.append(f"{row.load:.2f}")
                cells.append(format_bytes(row.disk_written_bytes_per_day) if row.disk_bytes else "-")
            chosen = row == answer.chosen
            cells.append("cheapest" if chosen else "yes" if row.meets else "no")
            table.add_row(*cells, style="bold" if chosen else None if row.meets else "dim")
        table.add_section()
    return table


def _host(row: Candidate) -> str:
    if not row.host_bytes:
        return "no cache"
    return f"({format_bytes(row.host_bytes)})" if row.staged else format_bytes(row.host_bytes)


def _conclusion(answer: Answer) -> list[Text]:
    chosen = answer.chosen
    if chosen is None:
        return [Text(f"No size meets {target_words(answer)}: {answer.why_none}.", style="bold yellow")]
    if not chosen.host_bytes:
        return [Text(f"No cache is needed: {target_words(answer)} is met without.", style="bold")]
    price = money(chosen.cost, answer.prices)
    return [
        Text(f"Cheapest of {len(answer.candidates)} tried: {words_of(chosen)}, {price}.", style="bold"),
        # To be copied: one line, however narrow the table is.
        Text("  " + " ".join(_settings(answer, chosen)), no_wrap=True, overflow="ignore"),
    ]


def _settings(answer: Answer, chosen: Candidate) -> list[str]:
    """The settings of a manager like the one that was replayed, as far as they are not the default."""
    settings, rules, usual = [], answer.rules, DiskRules()
    if not chosen.staged:
        settings.append(f"{variable('host_bytes')}={_gigabytes(chosen.host_bytes)}")
    if chosen.disk_bytes:
        settings.append(f"{variable('disk_bytes')}={_gigabytes(chosen.disk_bytes)}")
    if answer.policy != Settings().eviction:
        settings.append(f"{variable('eviction')}={answer.policy}")
    if chosen.disk_bytes and not chosen.staged:
        if rules.admission != usual.admission:
            settings.append(f"{variable('disk_admission')}={rules.admission}")
        if rules.budget_bytes_per_day is not None:
            settings.append(f"{variable('disk_write_budget_bytes')}={rules.budget_bytes_per_day}")
    return settings


def money(cost: float, prices: Prices) -> str:
    """A cost with its unit."""
    return f"${cost:,.2f} a month" if prices.unit == DOLLARS else f"{cost:.1f} {prices.unit}"


def _gigabytes(size_bytes: int) -> str:
    """Rounded up, so that as many blocks fit as were tried."""
    return f"{math.ceil(size_bytes / GB * 1000) / 1000:g}"


def _notes(answer: Answer) -> list[Text]:
    trace, prices = answer.trace, answer.prices
    everything = format_bytes(trace.everything_bytes or 0)
    served = (
        f"{trace.requests:,} requests in {trace.seconds / SECONDS_PER_HOUR:,.1f} h ask for {trace.accesses:,} blocks "
        f"of {trace.block_tokens} tokens; all different ones take {everything}; no cache can hit more than "
        f"{trace.repeated_rate:.2%}."
    )
    lines = [served]
    if prices.unit == DOLLARS:
        whose = "ASSUMED prices, not an offer (--price-host, --price-disk)" if prices.assumed else "Prices"
        lines.append(
            f"{whose}: host ${prices.host_per_gb:g}, disk ${prices.disk_per_gb:g} for a GB in a month."
        )
    else:
        all_bytes = [
            100.0 * GB / price if price else 0.0 for price in (prices.host_per_gb, prices.disk_per_gb)
        ]
        lines.append(
            f"Instead of prices: percent of the memory that this machine has available, {format_bytes(all_bytes[0])}, "
            f"plus percent of its free disk, {format_bytes(all_bytes[1])}."
        )
    if any(row.staged for row in answer.candidates):
        lines.append(
            "(host): not a tier, but the staging area of a disk alone. A hit rate says nothing about speed."
        )
    lines += [f"NB: {note}." for note in answer.notes]
    return [Text(line, style="yellow" if line.startswith("NB") else "dim") for line in lines]
