"""`kvbm config`: the settings that apply in this environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvbm.present.numbers import format_bytes
from kvbm.settings import (
    FIELDS,
    Kind,
    LoadedSettings,
    available_memory_bytes,
    load_settings,
    process_environment,
)

app = typer.Typer(rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  kvbm config show
  DYN_KVBM_CPU_CACHE_GB=20 kvbm config show --json
"""


@app.callback()
def config() -> None:
    """Show the settings and where each comes from."""


@app.command(epilog=_EXAMPLES)
def show(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")
    ] = None,
) -> None:
    """Print every setting with its value and its origin.

    Sizes are bytes in JSON. Warnings go to stderr, and into the JSON.
    """
    loaded = load_settings(process_environment(), file=file, memory_bytes=available_memory_bytes())
    if as_json:
        print(json.dumps(as_document(loaded), indent=2))
        return
    rows = [
        (name, _readable(name, value), loaded.origins[name])
        for name, value in msgspec.structs.asdict(loaded.settings).items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    for kind, lines in (("warning", loaded.warnings), ("note", loaded.notices)):
        for line in lines:
            print(f"{kind}: {line}", file=sys.stderr)


def as_document(loaded: LoadedSettings) -> dict[str, object]:
    """The same for JSON: `settings.<field>` has the `value`, its `origin` and the `variable` that sets it."""
    return {
        "settings": {
            name: {"value": value, "origin": loaded.origins[name], "variable": FIELDS[name].variable}
            for name, value in msgspec.structs.asdict(loaded.settings).items()
        },
        "warnings": loaded.warnings,
        "notices": loaded.notices,
    }


def _readable(field: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    if FIELDS[field].kind is Kind.SIZE and isinstance(value, int):
        return format_bytes(value)
    return str(value)
