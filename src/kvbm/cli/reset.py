"""`kvbm reset`: drop the blocks of a running manager that are not in use."""

from __future__ import annotations

from typing import Annotated

import typer

from kvbm.admin_protocol import Describe, Description
from kvbm.cli.managers import SLOT_TIERS, JsonOption, ManagerOption, parse_tier, settings_for, tier_label
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import SettingsError
from kvbm.present.tables import json_text
from kvbm.protocol import Reset, ResetReply

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm reset --tier G2
  kvbm reset --tier all --manager /run/kvbm/manager.sock
"""


@app.command(epilog=_EXAMPLES)
def reset(
    tier: Annotated[str, typer.Option(metavar="G2|G3|all", help="Host memory, disk, or both.")],
    manager: ManagerOption = "",
    as_json: JsonOption = False,
) -> None:
    """Drop the blocks of a tier in all namespaces, while the manager serves.

    Blocks in use stay: those that a request has leased, and those under way between tiers.
    """
    wanted = parse_tier(tier, ("G2", "G3", "all"))
    settings = settings_for(manager)
    path = choose_manager(settings)
    with Admin(path, settings) as admin:
        spaces = admin.ask(Describe(), Description).spaces
        there = sorted(
            {each.tier for space in spaces for each in space.tiers} & set(SLOT_TIERS), reverse=True
        )
        if wanted and spaces and wanted not in there:
            raise SettingsError("--tier", tier, f"a tier of the manager at {path}: it has no {wanted} tier")
        results = {each: admin.ask(Reset(tier=each), ResetReply) for each in there if wanted in ("", each)}
    if as_json:
        print(json_text({"manager": path, "tiers": results}))
        return
    print(f"manager {path}:")
    for each, result in results.items():
        stay = f", {result.in_use} stay because they are in use" if result.in_use else ""
        print(f"  {tier_label(each)}: {result.dropped} blocks dropped{stay}")
        if result.undone:
            print(f"    those on disk may come back if the manager is killed now: {result.undone}")
    if not results:
        print("  no engine has connected yet: there is nothing to drop")
