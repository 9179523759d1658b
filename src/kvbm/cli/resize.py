"""`kvbm resize`: give the host tier of a running manager another size."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from kvbm.admin_protocol import Resize, Resized
from kvbm.cli.managers import JsonOption, ManagerOption, settings_for
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import ManagerRefused, ManagerUnavailable, SettingsError
from kvbm.present.numbers import format_bytes
from kvbm.present.tables import json_text
from kvbm.settings import parse_size

RESIZE_S_MAX = 3600.0
"""How long the answer is waited for. It bounds the wait alone: a resize that has begun goes on to its end."""
INTERRUPTED_EXIT_CODE = 1
_GOES_ON = "the resize goes on in the manager; kvbm status shows how far it is"

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm resize --host 8GB
  kvbm resize --host 20GiB --manager /run/kvbm/manager.sock
Nothing stops a resize that has begun: Ctrl-C ends this command, and kvbm status,
kvbm top and the page show how far it is. Resize again, when it has ended, to go back.
"""


@app.command(epilog=_EXAMPLES)
def resize(
    host: Annotated[str, typer.Option(metavar="SIZE", help="New size of the host tier (G2): 8GB, 512MiB.")],
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make the host tier of a running manager larger or smaller, while it serves.

    Blocks are carried over, as many as there is room for; the disk tier is not touched. Until the engines have gone
    over there is memory of both sizes: they connect again, and none of their requests fails. Ctrl-C ends the wait, not
    the resize. The next manager starts with the size of the settings again.
    """
    size = parse_size("--host", host)
    if not size:
        raise SettingsError(
            "--host", host, "a size above 0, such as 8GB: a running tier cannot be switched off"
        )
    settings = settings_for(manager)
    path = choose_manager(settings)
    with Admin(path, settings) as admin:
        if sys.stderr.isatty():
            print("kvbm: resizing; Ctrl-C ends the wait, not the resize", file=sys.stderr)
        try:
            reply = admin.ask(Resize(host_bytes=size), Resized, RESIZE_S_MAX)
        except KeyboardInterrupt:
            print(f"kvbm: interrupted: {_GOES_ON}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
        except ManagerUnavailable as error:
            raise ManagerUnavailable(f"{error}; if it runs still, {_GOES_ON}") from None
    if reply.refusal:
        raise ManagerRefused(f"the manager at {path} refused: {reply.refusal}")
    if as_json:
        print(json_text({"manager": path, **_reported(reply)}))
        return
    print(f"manager {path}:")
    if reply.slots:
        now, before = format_bytes(reply.after_bytes), format_bytes(reply.before_bytes)
        print(f"  G2 host: {now} ({reply.slots} blocks), was {before}")
        print(f"  {reply.carried} of {reply.blocks_before} blocks carried over in {reply.seconds:.1f} s")
        if reply.dropped:
            print(f"  {reply.dropped} blocks were dropped from it")
        if reply.pins_ended:
            print(f"  pins ended, because their blocks do not fit any more: {reply.pins_ended}")
    else:
        print(f"  G2 host: {format_bytes(size)} from the first engine on: none has connected yet")
    print("  a manager that starts again has the size of its settings: change them too to keep this one")


def _reported(reply: Resized) -> dict[str, object]:
    fields = msgspec.structs.asdict(reply)
    del fields["refusal"]
    return fields
