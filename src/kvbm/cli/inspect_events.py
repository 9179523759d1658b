"""`kvbm inspect events`: the KV events that a manager publishes for routers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvbm.admin_protocol import Describe, Description
from kvbm.block import Tier
from kvbm.cli.managers import JsonOption, ManagerOption, settings_for, tier_label
from kvbm.client.admin import Admin, choose_manager
from kvbm.clock import monotonic
from kvbm.errors import KvbmError, SettingsError
from kvbm.events.wire import Cleared, Event, Stored, WireError, events_in
from kvbm.settings import parse_endpoint, variable

if TYPE_CHECKING:
    from kvbm.events.subscriber import Message

SECONDS_MAX = 600
EXAMPLES = """\b
Examples:
  kvbm inspect events
  kvbm inspect events --seconds 60 --json
  kvbm inspect events --endpoint tcp://10.0.0.7:5557
"""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]"}


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event, as `--json` prints it. Of the tokens of a stored block only the count; `error` where the rest of the
    message, or all of it, could not be read."""

    namespace: str = ""
    number: int | None = None
    event: str = ""
    tier: str = ""
    block: str = ""
    before: str = ""
    tokens: int | None = None
    error: str = ""


def events(
    endpoint: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Where events are published; left out, ask the manager.")
    ] = "",
    seconds: Annotated[str, typer.Option(metavar="N", help=f"Seconds to read, up to {SECONDS_MAX}.")] = "5",
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Print the KV events that a manager publishes, a line each: first those of what it holds, then changes.

    With --json every line is a JSON object.
    """
    most_s = _parse_seconds(seconds)
    place = parse_endpoint("--endpoint", endpoint) if endpoint else _find_endpoint(manager)
    # Imported late: the other lists need no ZMQ.
    subscriber = importlib.import_module("kvbm.events.subscriber")
    count = 0
    for message in subscriber.read_messages(_reachable(place), most_s, monotonic):
        for row in _rows_of(message):
            print(msgspec.json.encode(row).decode() if as_json else _line_of(row), flush=True)
            count += 1
    if not count and not as_json:
        print(f"{place}: no event came within {most_s:g} s")


def _find_endpoint(manager: str) -> str:
    """Where the manager publishes. Raises KvbmError where it does not."""
    settings = settings_for(manager)
    with Admin(choose_manager(settings), settings) as admin:
        published = admin.ask(Describe(), Description).events
        if not published:
            raise KvbmError(
                f"the manager at {admin.socket_path} publishes no KV events: start it with "
                f"--events tcp://127.0.0.1:5557 ({variable('events_endpoint')})"
            )
        return published


def _reachable(endpoint: str) -> str:
    """The loopback address of an endpoint that is bound on all interfaces."""
    for every, one in _LOOPBACK.items():
        if endpoint.startswith(f"tcp://{every}:"):
            return f"tcp://{one}:" + endpoint.rpartition(":")[2]
    return endpoint


def _rows_of(message: Message | None) -> Iterator[Row]:
    if message is None:
        yield Row(error="a message has other frames than topic, number and payload")
        return
    try:
        for event in events_in(message.payload):
            yield _row_of(message.topic, message.number, event)
    except WireError as error:
        yield Row(namespace=message.topic, number=message.number, error=str(error))


def _row_of(namespace: str, number: int, event: Event) -> Row:
    if isinstance(event, Cleared):
        return Row(namespace=namespace, number=number, event="cleared")
    tier, block = event.tier.name.lower(), _hash_text(event.name)
    if not isinstance(event, Stored):
        return Row(namespace=namespace, number=number, event="removed", tier=tier, block=block)
    before = "" if event.before is None else _hash_text(event.before)
    return Row(
        namespace=namespace,
        number=number,
        event="stored",
        tier=tier,
        block=block,
        before=before,
        tokens=len(event.tokens),
    )


def _line_of(row: Row) -> str:
    place = f"{row.namespace} {row.number}" if row.number is not None else "-"
    if row.error:
        return f"{place} unreadable: {row.error}"
    tier = tier_label(row.tier) if row.tier and row.tier != Tier.DEVICE.name.lower() else row.tier
    after = f"after {row.before}" if row.before else ""
    tokens = f"{row.tokens} tokens" if row.tokens is not None else ""
    return "  ".join(part for part in (place, row.event, tier, row.block, after, tokens) if part)


def _hash_text(name: int) -> str:
    return f"{name:016x}"


def _parse_seconds(text: str) -> float:
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= SECONDS_MAX):
        raise SettingsError("--seconds", text, f"a number from 1 to {SECONDS_MAX}")
    return float(text)
