"""`kvbm top`: is it working, is it worth it, what should be changed; live, or once for a script."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from kvbm.cli.top_picture import page
from kvbm.client.snapshots import SnapshotSource
from kvbm.errors import SettingsError
from kvbm.observe.view import look, start_of
from kvbm.present.tables import console, json_text
from kvbm.settings import load_settings, process_environment

ONCE_S, LIVE_S = 10.0, 3.0
"""The manager's answer is waited for this long."""

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm top
  kvbm top --once
  kvbm top --once --json | jq .hit_rate
  kvbm top --manager /run/kvbm/manager.sock --interval 5
"""


@app.command(epilog=_EXAMPLES)
def top(
    manager: Annotated[
        str,
        typer.Option(help="Socket of the manager; the only one that runs when left out.", metavar="SOCKET"),
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
    since_start: Annotated[
        bool, typer.Option("--since-start", help="Count from the manager's start, not over the last minute.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60.0, metavar="S", help="Seconds between two looks.")
    ] = 2.0,
) -> None:
    """Watch a running manager: tiers, flows, prefixes, engines, and what would help.

    Keys: s counts from the start or over the last minute, space pauses, q ends.
    """
    if as_json and not once:
        raise SettingsError("--json", "", "a value only together with --once")
    settings = load_settings(process_environment(), {"manager": manager or None}).settings
    # Whoever presses q waits for an answer that is under way.
    source = SnapshotSource(settings, ONCE_S if once else LIVE_S)
    try:
        if once:
            _print_once(source, as_json, since_start)
            return
        if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
            raise SettingsError("terminal", "none", "a terminal for input, output and errors, or --once")
        application = _live()
        source.take()  # an error is told before the screen is taken over
        application(source, interval, since_start).run()
    finally:
        source.close()


def _print_once(source: SnapshotSource, as_json: bool, since_start: bool) -> None:
    state = source.take()
    view = look(state, start_of(state) if since_start else None)
    if as_json:
        print(json_text({"socket": source.socket_path, **msgspec.structs.asdict(view)}))
        return
    screen: Console = console()
    screen.print(page(view, source.socket_path, screen.width))


def _live() -> Callable[[SnapshotSource, float, bool], Any]:
    try:
        screen: Callable[[SnapshotSource, float, bool], Any] = importlib.import_module(
            "kvbm.cli.top_app"
        ).TopApp
        return screen
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        raise SettingsError(
            "textual", "not installed", "pip install 'openkvbm[top]', or --once without it"
        ) from None
