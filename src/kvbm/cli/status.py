"""`kvbm status`: whether the running managers work, what they hold, and for whom."""

from __future__ import annotations

import sys

import msgspec
import typer
from rich.text import Text

from kvbm.admin_protocol import Describe, Description, EngineReport, SpaceReport
from kvbm.block import NO_COUNT
from kvbm.cli.managers import JsonOption, ManagerOption, settings_for, tier_label
from kvbm.client.admin import Admin, running_managers
from kvbm.errors import KvbmError
from kvbm.present import tables
from kvbm.present.numbers import format_bytes, format_ms, name_ranks
from kvbm.present.tables import json_text, plain_table
from kvbm.remote_report import RemoteReport

FAULT_EXIT_CODE = 1
TROUBLES_SHOWN = 3
"""So many nodes that are not reached are named; `--json` has all."""

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm status
  kvbm status --manager /run/kvbm/manager.sock
  kvbm status --json
"""


class ManagerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A manager, as far as it answered; `faults` has a line for each thing that does not work."""

    socket: str
    faults: list[str]
    description: Description | None = None


@app.command(epilog=_EXAMPLES)
def status(manager: ManagerOption = "", as_json: JsonOption = False) -> None:
    """Show the running managers: tiers, engines, queues and faults.

    The exit status is 1 when something does not work, or no manager runs.
    """
    settings = settings_for(manager)
    found = []
    for path in running_managers(settings):
        try:
            with Admin(path, settings) as admin:
                description = admin.ask(Describe(), Description)
        except KvbmError as error:
            found.append(ManagerStatus(socket=path, faults=[str(error)]))
        else:
            found.append(ManagerStatus(socket=path, faults=faults_of(description), description=description))
    if as_json:
        print(json_text({"managers": found}))
    else:
        for each in found:
            _show(each)
        if not found:
            print(f"kvbm: no manager runs in {settings.runtime_dir}", file=sys.stderr)
    if not found or any(each.faults for each in found):
        raise typer.Exit(FAULT_EXIT_CODE)


def faults_of(description: Description) -> list[str]:
    """One line for each thing that does not work."""
    faults = []
    for space in description.spaces:
        name = f"namespace {space.namespace} ({space.model})"
        if space.fault:
            faults.append(f"{name} is off: {space.fault}")
        faults += [
            f"{tier_label(tier.tier)} of {name} does not work: {tier.fault}"
            for tier in space.tiers
            if tier.fault
        ]
        faults += [
            f"{tier_label('remote')} of {name} takes no blocks: {each.store_fault}"
            for each in space.remotes
            if each.store_fault and not each.fault
        ]
        faults += [
            f"{tier_label('remote')} of {name}: the fleet {each.fleet!r}: {each.fleet_fault}"
            for each in space.remotes
            if each.fleet_fault
        ]
    faults += [
        f"engine {engine.engine} runs without a KV cache: {lacking}"
        for engine in description.engines
        if (lacking := _lacking(engine))
    ]
    return faults


def _lacking(engine: EngineReport) -> str:
    """The parts of an engine that are not connected; empty when all are."""
    missing = engine.missing
    parts = [f"{name_ranks(missing)} of {engine.rank_count} not connected"] if missing else []
    return " and ".join(parts + ([] if engine.led else ["its scheduler not connected"]))


def _show(status: ManagerStatus) -> None:
    console = tables.console()
    description = status.description
    state = "has faults" if status.faults else "works"
    if description is None:
        state = "does not answer"
    console.print(tables.title_line(f"manager {status.socket}: {state}"))
    for fault in status.faults:
        console.print(Text(f"  fault: {fault}"), soft_wrap=True)
    if description is None:
        return
    console.print(
        f"  up {_duration(description.uptime_s)}, pid {description.pid}, "
        f"version {description.version or 'unknown'}, {_found(description)}",
        soft_wrap=True,
    )
    if not description.spaces:
        console.print("  no engine has connected yet: there are no tiers\n")
        return
    console.print(_tier_table(description.spaces))
    for line in (*favour_lines(description.spaces), *remote_lines(description.spaces)):
        console.print(f"  {line}", soft_wrap=True)
    console.print(_engine_table(description.engines) if description.engines else "  no engine is connected\n")


def _found(description: Description) -> str:
    asked = description.asked_blocks
    if not asked:
        return "nothing was looked up yet"
    shares = ", ".join(
        f"{blocks / asked:.1%} in {tier_label(tier)}" for tier, blocks in description.hit_blocks.items()
    )
    return f"{asked} blocks looked up since the start: {shares}"


def _tier_table(spaces: tuple[SpaceReport, ...]) -> object:
    headings = (
        "namespace",
        "model",
        "tier",
        "size",
        "blocks",
        "full",
        "filling",
        "leased",
        "queued",
        "state",
    )
    table = plain_table(headings, words={"namespace", "tier", "state"}, folded={"model"})
    for space in spaces:
        for tier in space.tiers:
            staging = space.staging and tier.tier == "host"
            bounded = tier.blocks != NO_COUNT
            table.add_row(
                space.namespace,
                Text(space.model),
                tier_label(tier.tier) + (" (staging)" if staging else ""),
                format_bytes(tier.blocks * space.block_bytes) if bounded else "-",
                str(tier.blocks) if bounded else f"{tier.resident} known",
                f"{tier.resident / tier.blocks:.1%}" if bounded else "-",
                str(tier.filling),
                str(tier.leased),
                f"{_queued_into(space, tier.tier)} in",
                "off" if tier.fault or space.fault else "on",
            )
    return table


def _queued_into(space: SpaceReport, tier: str) -> int:
    """Blocks that wait for a tier, or are on their way there."""
    if tier == "host":
        return space.onboard_blocks + sum(each.up_blocks for each in space.remotes)
    return space.offload_blocks if tier == "disk" else sum(each.down_blocks for each in space.remotes)


def remote_lines(spaces: tuple[SpaceReport, ...]) -> list[str]:
    """A line for each remote store of a namespace: where it is, and what it costs and does; or for each fleet."""
    lines = []
    for space in spaces:
        for each in space.remotes:
            shown = "; ".join(filter(None, _fleet_parts(each) if each.fleet else _store_parts(each)))
            lines.append(f"{tier_label('remote')} of namespace {space.namespace}, {each.shown}: {shown}")
    return lines


def _store_parts(store: RemoteReport) -> list[str]:
    asked = ", ".join(f"{count} {kind}" for kind, count in store.requests.items())
    return [
        "" if store.complete else "not all that lies there is known yet",
        "" if store.writes else "only read",
        f"requests: {asked}" if asked else "",
        f"read {format_bytes(store.read_bytes)}, written {format_bytes(store.written_bytes)}",
        f"latency {format_ms(store.latency_s)}" if store.latency_s else "",
        f"{store.corrupt_blocks} blocks were corrupt" if store.corrupt_blocks else "",
        f"{store.compressed_packs} compressed packs were left alone" if store.compressed_packs else "",
        *(f"it {note}" for note in store.notes),
        f"the last collection failed: {store.collect_error}" if store.collect_error else "",
    ]


def _fleet_parts(fleet: RemoteReport) -> list[str]:
    by = [f"{count} over {transport.upper()}" for transport, count in sorted(fleet.links.items()) if count]
    more = len(fleet.troubles) - TROUBLES_SHOWN
    return [
        f"{fleet.nodes_reached} of {fleet.nodes} nodes reached" + (f" ({', '.join(by)})" if by else ""),
        f"{fleet.blocks} blocks known",
        f"certificates {'on' if fleet.tls else 'off'}",
        *(f"it {note}" for note in fleet.notes),
        *fleet.troubles[:TROUBLES_SHOWN],
        f"{more} more nodes are not reached" if more > 0 else "",
    ]


def favour_lines(spaces: tuple[SpaceReport, ...]) -> list[str]:
    """A line for each tier in which blocks are favoured: of several cache salts, or retained ones."""
    lines = []
    for space in spaces:
        for tier in space.tiers:
            parts = [f"{tier.retained} retained blocks"] if tier.retained else []
            if tier.salts > 1:
                parts.append(f"{tier.salts} active cache salts, {tier.poor} of them below their sure share")
            if parts:
                lines.append(f"{tier_label(tier.tier)} of namespace {space.namespace}: {', '.join(parts)}")
    return lines


def _engine_table(engines: tuple[EngineReport, ...]) -> object:
    headings = ("engine", "model", "namespace", "ranks", "leases", "leased blocks", "at most", "state")
    table = plain_table(headings, words={"namespace", "state"}, folded={"engine", "model"})
    for engine in engines:
        table.add_row(
            Text(engine.engine),
            Text(engine.model),
            engine.namespace,
            f"{len(engine.ranks)} of {engine.rank_count}",
            str(engine.leases),
            str(engine.leased_blocks),
            str(engine.lease_blocks_max),
            _lacking(engine) or "connected",
        )
    return table


def _duration(seconds: float) -> str:
    """A time for people: `42 s`, `3 min`, `5.2 h`, `12.0 days`."""
    for unit, length_s, digits in (("days", 86400.0, 1), ("h", 3600.0, 1), ("min", 60.0, 0)):
        if seconds >= 2 * length_s or (unit == "h" and seconds >= length_s):
            return f"{seconds / length_s:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
