"""Shows the answers of `kvbm plan --remote`: what each way costs and hits, whether the store pays, and its bill."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbm.present.numbers import format_bytes
from kvbm.present.tables import plain_table, title_line
from kvbm.settings import Settings, variable
from kvbm.settings.parse import GB
from kvbm.sim.plan.cheapest import frontier
from kvbm.sim.plan.store_prices import StoreMonth
from kvbm.sim.plan.stores import DISK, HOST, PAUSES_SHARE, STORE, StoreAnswer, StoreAnswers, Way
from kvbm.sim.serving.store import StoreRules
from kvbm.sim.simulate.report import SECONDS_PER_HOUR


def render(answers: StoreAnswers, everything: bool) -> RenderableType:
    """For each trace: a table of the ways, the verdict, the store's bill, and the assumptions."""
    parts: list[RenderableType] = []
    for answer in answers.plans:
        parts += [_title(answer), _table(answer, everything), *_verdict(answer), Text("")]
        if answer.best is not None and answer.best.month is not None:
            parts.append(_bill(answer, answer.best.month))
        parts += [*_notes(answer), Text("")]
    return Group(*parts)


def store_words(rules: StoreRules) -> str:
    """The store in words."""
    size = format_bytes(rules.size_bytes) if rules.size_bytes is not None else "of any size"
    return f"a store {size}, {rules.ttl_s / SECONDS_PER_HOUR:g} h"


def _title(answer: StoreAnswer) -> Text:
    rate = answer.target.least_hit_rate or 0.0
    return title_line(
        f"{answer.trace.name}, {answer.policy}, {_nodes(answer)} ({answer.route}), {store_words(answer.store)}: "
        f"a hit rate of at least {rate:.4g}"
    )


def _nodes(answer: StoreAnswer) -> str:
    return "1 node" if answer.nodes == 1 else f"{answer.nodes} nodes"


def _table(answer: StoreAnswer, everything: bool) -> Table:
    headings = ["host\na node", "disk\na node", "store", "\n$/month", "\nhits", "of the\nstore", "\nmeets"]
    table = plain_table(headings, words={"\nmeets"})
    for kind in (HOST, DISK, STORE):
        ways = [way for way in answer.ways if way.kind == kind]
        kept = frontier([(way.cost, -way.hit_rate) for way in ways])
        for way in ways if everything else [ways[i] for i in kept]:
            best = way in (answer.best, answer.without)
            style = "bold" if best else None if way.meets else "dim"
            table.add_row(*_cells(way), _meets(answer, way), style=style)
        table.add_section()
    return table


def _cells(way: Way) -> list[str]:
    host = format_bytes(way.host_bytes)
    return [
        f"({host})" if way.kind == DISK else host,
        format_bytes(way.disk_bytes) if way.disk_bytes else "-",
        format_bytes(way.month.stored_bytes) if way.month is not None else "-",
        f"{way.cost:,.2f}",
        f"{way.hit_rate:.1%}",
        f"{way.store_hit_rate:.1%}" if way.month is not None else "-",
    ]


def _meets(answer: StoreAnswer, way: Way) -> str:
    if not way.meets:
        return "no"
    cheapest = {id(answer.best): "cheapest with it", id(answer.without): "cheapest without"}
    return cheapest.get(id(way), "yes")


def _sizes(way: Way) -> str:
    return (
        f"{format_bytes(way.disk_bytes)} of disk"
        if way.kind == DISK
        else f"{format_bytes(way.host_bytes)} of host"
    )


def _verdict(answer: StoreAnswer) -> list[Text]:
    best, without = answer.best, answer.without
    if best is None:
        return [Text("--max-host 0 leaves nothing that a store could stand below.", style="bold yellow")]
    here = f"with the store: {_sizes(best)} a node, ${best.cost:,.2f} a month"
    there = "" if without is None else f"without: {_sizes(without)} a node, ${without.cost:,.2f}"
    if not best.meets:
        nearest = (
            f"No size meets the target with the store; {_sizes(best)} a node, ${best.cost:,.2f}, hits most"
        )
        lines = [Text(f"{nearest}{'; ' + there if there else ''}.", style="bold yellow")]
    elif without is None:
        lines = [Text(f"Only the store meets the target. Cheapest {here}.", style="bold")]
    else:
        word = "pays" if answer.pays else "does not pay"
        more = abs(best.cost - without.cost)
        lines = [
            Text(f"The store {word}: cheapest {here}; {there}.", style="bold"),
            Text(
                f"That is ${more:,.2f} a month {'less' if answer.pays else 'more'} for all nodes.",
                style="bold",
            ),
        ]
    if answer.same_money:
        bought = ", ".join(f"{_sizes(way)} a node: {way.hit_rate:.1%}" for way in answer.same_money)
        lines.append(
            Text(f"The same money without a store buys {bought}. With the store {best.hit_rate:.1%}.")
        )
    # To be copied: one line, however narrow the table is.
    lines.append(Text("  " + " ".join(_settings(answer, best)), no_wrap=True, overflow="ignore"))
    return lines


def _settings(answer: StoreAnswer, best: Way) -> list[str]:
    """The settings of each node's manager, as far as they are not the default."""
    rules, usual = answer.store, Settings()
    settings = [f"{variable('host_bytes')}={_gigabytes(best.host_bytes)}", f"{variable('remote')}=URL"]
    if rules.size_bytes is not None:
        settings.append(f"{variable('remote_bytes')}={_gigabytes(rules.size_bytes)}")
    hours = max(1, math.ceil(rules.ttl_s / SECONDS_PER_HOUR))
    if hours != usual.remote_ttl_hours:
        settings.append(f"{variable('remote_ttl_hours')}={hours}")
    if rules.admission != usual.remote_admission:
        settings.append(f"{variable('remote_admission')}={rules.admission}")
    if answer.policy != usual.eviction:
        settings.append(f"{variable('eviction')}={answer.policy}")
    return settings


def _gigabytes(size_bytes: int) -> str:
    """Rounded up, so that as many blocks fit as were tried."""
    return f"{math.ceil(size_bytes / GB * 1000) / 1000:g}"


def _bill(answer: StoreAnswer, month: StoreMonth) -> Table:
    """What the store costs in a month, item by item."""
    prices = answer.store_prices
    table = plain_table(
        ["the store in a month", "how much", "in requests of", "price", "$"], words={"the store in a month"}
    )
    puts, gets = f"${prices.per_1000_puts:g}/1,000", f"${prices.per_1000_gets:g}/1,000"
    put = prices.per_1000_puts / 1000
    get = prices.per_1000_gets / 1000
    for what, much, each, price, cost in (
        ("stored", format_bytes(month.stored_bytes), "", f"${prices.per_gb:g}/GB", month.storage_cost),
        (
            "written",
            f"{format_bytes(month.written_bytes)} in {month.puts:,.0f}",
            _blocks(month.blocks_a_put),
            puts,
            month.puts * put,
        ),
        (
            "read",
            f"{format_bytes(month.read_bytes)} in {month.gets:,.0f}",
            _blocks(month.blocks_a_get),
            gets,
            month.gets * get,
        ),
        ("nodes' logs and listings, written", f"{month.told_puts:,.0f}", "", puts, month.told_puts * put),
        ("nodes' logs, read", f"{month.told_gets:,.0f}", "", gets, month.told_gets * get),
        ("egress", format_bytes(month.read_bytes), "", f"${prices.egress_per_gb:g}/GB", month.egress_cost),
    ):
        table.add_row(what, much, each, price, f"{cost:,.2f}")
    table.add_row("all", "", "", "", f"{month.cost:,.2f}", style="bold")
    return table


def _blocks(count: float) -> str:
    return f"{count:.1f} blocks" if count else ""


def _notes(answer: StoreAnswer) -> list[Text]:
    trace, prices, store = answer.trace, answer.prices, answer.store_prices
    assumed = [
        name
        for name, is_assumed in (
            ("--price-host, --price-disk", prices.assumed),
            ("--price-remote, --price-put, --price-get", store.assumed),
        )
        if is_assumed
    ]
    whose = f"ASSUMED prices, not an offer ({', '.join(assumed)})" if assumed else "Prices"
    asked = (
        f"{trace.requests:,} requests in {trace.seconds / SECONDS_PER_HOUR:,.1f} h ask {_nodes(answer)} for "
        f"{trace.accesses:,} blocks of {trace.block_tokens} tokens; no cache can hit more than "
        f"{trace.repeated_rate:.2%}."
    )
    each = f"host ${prices.host_per_gb:g}, disk ${prices.disk_per_gb:g}, store ${store.per_gb:g}"
    month = (
        "A month is 30 days like the trace: every hour brings as many new blocks, and a block stays in the store until "
        "nobody has used it for the TTL, or there is no room."
    )
    lines = [asked, f"{whose}: {each} for a GB in a month.", month, *_of_the_store(answer)]
    lines += [f"NB: {note}." for note in answer.notes]
    lines.append(
        "(host): not a tier, but the staging area of a disk alone. A hit rate says nothing about speed."
    )
    return [Text(line, style="yellow" if line.startswith("NB") else "dim") for line in lines]


def _of_the_store(answer: StoreAnswer) -> list[str]:
    best = answer.best
    if best is None or best.month is None:
        return []
    lines: list[str] = []
    if best.store_hit_rate:
        lines.append(
            f"{PAUSES_SHARE:.0%} of the blocks read had been written or used at most {_time(best.pause_s)} before, "
            f"in a trace of {_time(answer.trace.seconds)}; the TTL is {_time(answer.store.ttl_s)}."
        )
    if best.month.again:
        lines.append(
            f"{best.month.again:.1%} of what was written was there already: another node had just written it."
        )
    return lines


def _time(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:,.0f} h"
    return f"{seconds / 60:,.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
