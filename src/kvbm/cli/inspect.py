"""`kvbm inspect blocks|leases|namespaces|queues|events`: what a running manager holds, a page at a time."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from kvbm.admin_protocol import (
    PAGE_ROWS_MAX,
    BlockPage,
    Describe,
    Description,
    LeasePage,
    ListBlocks,
    ListLeases,
    SpaceReport,
)
from kvbm.cli import inspect_events
from kvbm.cli.managers import (
    JsonOption,
    ManagerOption,
    NamespaceOption,
    choose_space,
    parse_tier,
    settings_for,
    tier_label,
)
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import SettingsError
from kvbm.present import tables
from kvbm.present.numbers import format_bytes
from kvbm.present.tables import json_text, plain_table

app = typer.Typer(
    help="List what a running manager holds: blocks, leases, namespaces, queues; and print its KV events.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

StartOption = Annotated[str, typer.Option(metavar="N", help="Where the page starts.")]
LimitOption = Annotated[str, typer.Option(metavar="N", help=f"The most rows to list, up to {PAGE_ROWS_MAX}.")]
_KEY_DIGITS = 16


@app.command(
    epilog="\b\nExamples:\n  kvbm inspect blocks --tier G3\n  kvbm inspect blocks --start 5000 --limit 1000 --json"
)
def blocks(
    tier: Annotated[str, typer.Option(metavar="G2|G3", help="Host memory or disk.")] = "G2",
    namespace: NamespaceOption = "",
    start: StartOption = "0",
    limit: LimitOption = "50",
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """List the blocks in one tier of a namespace, by slot."""
    wanted, first, most = parse_tier(tier), _start(start), _limit(limit)
    with _admin(manager) as admin:
        space = choose_space(admin.ask(Describe(), Description).spaces, namespace)
        request = ListBlocks(fingerprint=space.fingerprint, tier=wanted, start=first, limit=most)
        page = admin.ask(request, BlockPage)
    if not page.found:
        raise SettingsError("--tier", tier, f"a tier of namespace {space.namespace}: it has no {wanted} tier")
    if as_json:
        print(
            json_text({"namespace": space.namespace, "tier": wanted, "blocks": page.rows, "next": page.next})
        )
        return
    table = plain_table(("slot", "key", "state", "leased"), words={"key", "state", "leased"})
    for row in page.rows:
        table.add_row(str(row.slot), row.key[:_KEY_DIGITS], row.state, "yes" if row.leased else "")
    _print(table, len(page.rows), f"blocks in {tier_label(wanted)} from slot {start} on")
    if page.next >= 0:
        print(f"There are more: --start {page.next}")


@app.command(epilog="Example: kvbm inspect leases --json")
def leases(
    start: StartOption = "0",
    limit: LimitOption = "50",
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """List the leases: blocks that a request holds in host memory, so that they are not evicted."""
    first, most = _start(start), _limit(limit)
    with _admin(manager) as admin:
        page = admin.ask(ListLeases(start=first, limit=most), LeasePage)
    after = first + len(page.rows)
    following = after if page.rows and after < page.total else -1
    if as_json:
        print(json_text({"leases": page.rows, "total": page.total, "next": following}))
        return
    headings = ("namespace", "engine", "lease", "blocks", "in host memory", "ends in s")
    table = plain_table(headings, words={"namespace"}, folded={"engine"})
    for row in page.rows:
        table.add_row(
            row.namespace,
            Text(row.engine),
            str(row.lease),
            str(row.blocks),
            str(row.ready),
            f"{row.ends_in_s:.0f}",
        )
    _print(table, len(page.rows), f"leases from number {start} on, of {page.total}")
    if following >= 0:
        print(f"There are more: --start {following}")


@app.command(epilog="Example: kvbm inspect namespaces")
def namespaces(manager: ManagerOption = "", as_json: JsonOption = False) -> None:
    """List the namespaces with the parts that engines must agree on before they share blocks."""
    with _admin(manager) as admin:
        spaces = admin.ask(Describe(), Description).spaces
    if as_json:
        print(json_text({"namespaces": spaces}))
        return
    table = plain_table(("namespace", "field", "value"), words={"namespace", "field"}, folded={"value"})
    for space in spaces:
        block = f"{space.block_tokens} tokens, {format_bytes(space.block_bytes)}"
        rows = [("model", space.model), ("block", block), *space.fields]
        for i, (field, value) in enumerate(rows):
            table.add_row("" if i else space.namespace, field, Text(value), end_section=i == len(rows) - 1)
    _print(table, len(spaces), "namespaces: no engine has connected yet")


@app.command(epilog="Example: kvbm inspect queues --json")
def queues(manager: ManagerOption = "", as_json: JsonOption = False) -> None:
    """Show what is under way: blocks between the tiers, stores of engines, slots behind a slow rank."""
    with _admin(manager) as admin:
        described = admin.ask(Describe(), Description)
    if as_json:
        rows = list(map(queue_row, described.spaces))
        print(json_text({"queues": rows, "fences": described.fences}))
        return
    remote = any(space.remotes for space in described.spaces)
    store = ("store to host", "host to store") if remote else ()
    headings = ("namespace", "disk to host", "host to disk", *store, "stores of engines")
    table = plain_table(headings, words={"namespace"})
    for space in described.spaces:
        row = queue_row(space)
        names = ["onboard_blocks", "offload_blocks"]
        names += ["remote_onboard_blocks", "remote_offload_blocks"] if remote else []
        table.add_row(space.namespace, *(f"{row[name]} blocks" for name in names), str(space.reservations))
    _print(table, len(described.spaces), "queues: no engine has connected yet")
    if described.fences:
        print(f"{described.fences} groups of slots wait until a slow rank writes no more to them")


def queue_row(space: SpaceReport) -> dict[str, str | int]:
    """What is under way in a namespace, as `--json` has it."""
    return {
        "namespace": space.namespace,
        "onboard_blocks": space.onboard_blocks,
        "offload_blocks": space.offload_blocks,
        "remote_onboard_blocks": sum(each.up_blocks for each in space.remotes),
        "remote_offload_blocks": sum(each.down_blocks for each in space.remotes),
        "reservations": space.reservations,
    }


app.command("events", epilog=inspect_events.EXAMPLES)(inspect_events.events)


def _start(text: str) -> int:
    return _whole("--start", text, 0, 1 << 40)


def _limit(text: str) -> int:
    return _whole("--limit", text, 1, PAGE_ROWS_MAX)


def _whole(option: str, text: str, least: int, most: int) -> int:
    """A number in these bounds. Raises SettingsError: its one line is what a script's log has room for."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise SettingsError(option, text, f"a number from {least} to {most}")
    return int(text)


def _admin(manager: str) -> Admin:
    settings = settings_for(manager)
    return Admin(choose_manager(settings), settings)


def _print(table: object, rows: int, what: str) -> None:
    if rows:
        tables.console().print(table)
    else:
        print(f"No {what}.")
