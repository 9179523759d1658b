"""`kvbm inspect events`: what a router learns from the KV events that a manager publishes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from kvbm.admin_protocol import Describe, Description
from kvbm.block import Tier
from kvbm.cli.managers import SLOT_TIERS, JsonOption, ManagerOption, settings_for, tier_label
from kvbm.cli.prompts import read_tokens
from kvbm.client.admin import Admin, choose_manager
from kvbm.clock import monotonic
from kvbm.errors import KvbmError, SettingsError
from kvbm.events.indexer_view import IndexerView, Leading
from kvbm.present import tables
from kvbm.present.tables import json_text, plain_table
from kvbm.settings import parse_endpoint, variable

SECONDS_MAX = 600
EXAMPLES = """\b
Examples:
  kvbm inspect events
  kvbm inspect events --tokens prompt.json
  kvbm inspect events --endpoint tcp://10.0.0.7:5557 --json
"""
_ANY = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]"}
_ENDS = {
    "complete": "that is what the manager holds",
    "quiet": "then nothing more came",
    "time": "and more was coming: --seconds",
    "full": "and there is no room for more blocks here",
}
_NOTHING_ODD = "nothing is odd: no gap, nothing told twice, no unknown block removed"
Held = dict[tuple[str, Tier], int]
"""Blocks by namespace and tier, by the manager's own account, of the tiers that it tells routers of."""


def events(
    endpoint: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Where events are published; left out, ask the manager.")
    ] = "",
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A prompt, as a JSON list of token ids: how much of it is cached?"),
    ] = None,
    seconds: Annotated[
        str, typer.Option(metavar="N", help=f"Read so long at most, up to {SECONDS_MAX}.")
    ] = "30",
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show what a router believes: read the KV events until all is told, and count blocks and what does not add up."""
    most_s = _seconds(seconds)
    prompt = read_tokens(tokens, "--tokens") if tokens is not None else None
    view = IndexerView()
    if endpoint:
        place, held = _reachable(parse_endpoint("--endpoint", endpoint)), None
        end = _read(place, view, None, most_s)
    else:
        settings = settings_for(manager)
        with Admin(choose_manager(settings), settings) as admin:
            place = _reachable(_published(admin))
            end = _read(place, view, admin, most_s)
            held = _held(admin.ask(Describe(), Description))
    leading = view.leading(prompt) if prompt is not None else []
    if as_json:
        print(json_text(_document(place, view, end, held, leading)))
    else:
        _print(place, view, end, held)
        _print_prompt(tokens, leading)


def _read(endpoint: str, view: IndexerView, admin: Admin | None, most_s: float) -> str:
    def complete() -> bool:
        if admin is None:
            return False
        held = _held(admin.ask(Describe(), Description))
        return all(view.count(*place) == blocks for place, blocks in held.items())

    # Imported late: the other lists need no ZMQ.
    subscriber = importlib.import_module("kvbm.events.subscriber")
    return str(subscriber.read_events(endpoint, view, complete, most_s, monotonic))


def _published(admin: Admin) -> str:
    """Where the manager publishes. Raises KvbmError where it does not."""
    published = admin.ask(Describe(), Description).events
    if not published:
        raise KvbmError(
            f"the manager at {admin.socket_path} publishes no KV events: start it with "
            f"--events tcp://127.0.0.1:5557 ({variable('events_endpoint')})"
        )
    return published


def _reachable(endpoint: str) -> str:
    """Who listens on all interfaces is reached at the loopback's."""
    for every, one in _ANY.items():
        if endpoint.startswith(f"tcp://{every}:"):
            return f"tcp://{one}:" + endpoint.rpartition(":")[2]
    return endpoint


def _held(described: Description) -> Held:
    return {
        (space.namespace, Tier[each.tier.upper()]): each.resident
        for space in described.spaces
        if not space.fault
        for each in space.tiers
        # Of what lies in a store only those blocks are announced that this node has seen.
        if each.tier in SLOT_TIERS and not (space.staging and each.tier == "host")
    }


def _document(
    endpoint: str, view: IndexerView, end: str, held: Held | None, leading: list[Leading]
) -> dict[str, object]:
    return {
        "endpoint": endpoint,
        "ended": end,
        "messages": view.messages,
        "first": view.first,
        "last": view.last,
        "missing": view.missing,
        "restarts": view.restarts,
        "told_twice": view.twice,
        "unknown_removals": view.unknown_removals,
        "cleared": view.cleared,
        "unreadable": view.unreadable,
        "tiers": [
            {
                "namespace": each.namespace,
                "tier": each.tier.name.lower(),
                "blocks": each.blocks,
                "held": held.get((each.namespace, each.tier)) if held is not None else None,
                "roots": each.roots,
                "chains": each.chains,
                "orphans": each.orphans,
            }
            for each in view.tiers()
        ],
        "prompt": [
            {
                "namespace": each.namespace,
                "prompt_blocks": each.prompt_blocks,
                "block_tokens": each.block_tokens,
                "blocks": each.blocks,
                "tiers": {tier.name.lower(): blocks for tier, blocks in each.tiers.items()},
            }
            for each in leading
        ],
    }


def _print(endpoint: str, view: IndexerView, end: str, held: Held | None) -> None:
    if view.first is None:
        print(f"{endpoint}: no message; {_ENDS[end]}")
    else:
        numbers = f"numbers {view.first} to {view.last}"
        print(f"{endpoint}: {view.messages} messages, {numbers}; {_ENDS[end]}")
    heads = ["namespace", "tier", "believed", "held", "roots", "chains", "orphans"]
    if held is None:
        heads.remove("held")
    table = plain_table(heads, words={"namespace", "tier"})
    for each in view.tiers():
        unknown = "-" if each.tier is Tier.REMOTE else 0
        known = [held.get((each.namespace, each.tier), unknown)] if held is not None else []
        counts = [each.blocks, *known, each.roots, each.chains, each.orphans]
        table.add_row(each.namespace, _tier(each.tier), *map(str, counts))
    if table.row_count:
        tables.console().print(table)
    for line in _odd(view, held if end == "quiet" else None) or [_NOTHING_ODD]:
        print(line)


def _odd(view: IndexerView, held: Held | None) -> list[str]:
    """What does not add up, a line each."""
    lines = {
        "messages are missing: this reader was too slow, or the network": view.missing,
        "blocks were told twice": view.twice,
        "blocks were removed that were not known": view.unknown_removals,
        "messages could not be read": view.unreadable,
        "times the numbers began anew: the manager was restarted": view.restarts,
    }
    odd = [f"{count} {what}" for what, count in lines.items() if count]
    for (namespace, tier), blocks in (held or {}).items():
        if blocks > (told := view.count(namespace, tier)):
            where = f"{namespace} {_tier(tier)}"
            odd.append(f"{where}: {blocks - told} blocks are not announced, no engine said what they are")
    return odd


def _print_prompt(file: Path | None, leading: list[Leading]) -> None:
    if file is None:
        return
    if not leading:
        print("prompt: no block of it is believed to be cached")
    for each in leading:
        tiers = ", ".join(f"{_tier(tier)} {blocks}" for tier, blocks in each.tiers.items())
        print(f"prompt in {each.namespace}: {each.blocks} of {each.prompt_blocks} blocks ({tiers})")


def _tier(tier: Tier) -> str:
    return "device" if tier is Tier.DEVICE else tier_label(tier.name.lower())


def _seconds(text: str) -> float:
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= SECONDS_MAX):
        raise SettingsError("--seconds", text, f"a number from 1 to {SECONDS_MAX}")
    return float(text)
