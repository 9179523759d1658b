"""`kvbm config`: the settings that apply in this environment, and what is wrong with a file of them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvbm.errors import SettingsError
from kvbm.present.numbers import format_bytes
from kvbm.settings import (
    FIELDS,
    Kind,
    LoadedSettings,
    available_memory_bytes,
    file_faults,
    load_settings,
    process_environment,
    shown,
)

app = typer.Typer(rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")]
ExtraConfig = Annotated[
    str, typer.Option(metavar="JSON", help="What an engine has as `kvbm` in its kv_connector_extra_config.")
]
"""Options that `kvbm doctor` has too."""

_EXAMPLES = """\b
Examples:
  kvbm config show
  DYN_KVBM_CPU_CACHE_GB=20 kvbm config show --json
  kvbm config show --extra-config '{"host_bytes": "20GB"}'
"""

_CHECK_EXAMPLES = """\b
Examples:
  kvbm config check kvbm.toml
  kvbm config check kvbm.toml --json
"""


@app.callback()
def config() -> None:
    """Show the settings and where each comes from, or check a file of them."""


@app.command(epilog=_EXAMPLES)
def show(
    as_json: AsJson = False,
    file: ConfigFile = None,
    extra_config: ExtraConfig = "",
) -> None:
    """Print every setting with its value and its origin.

    Sizes are bytes in JSON. Warnings go to stderr, and into the JSON.
    """
    loaded = load_settings(
        process_environment(),
        file=file,
        extra_config=parse_json("--extra-config", extra_config),
        memory_bytes=available_memory_bytes(),
    )
    if as_json:
        print(json.dumps(as_document(loaded), indent=2))
        return
    rows = [
        (name, _readable(name, shown(setting, getattr(loaded.settings, name))), loaded.origins[name])
        for name, setting in FIELDS.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    for kind, lines in (("warning", loaded.warnings), ("note", loaded.notices)):
        for line in lines:
            print(f"{kind}: {line}", file=sys.stderr)


@app.command(epilog=_CHECK_EXAMPLES)
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Settings file (TOML).")],
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with a settings file, one line for each fault; exit 2 if anything is.

    The file alone is looked at, without the environment. A name that no setting has is a fault here. A file that
    passes starts `kvbm manager` on this machine: policies, packages, certificates, keys, directories and addresses are
    looked for as at its start, and the key command is run. Sizes above this machine's memory and disk have a note.
    """
    faults, notes = file_faults(file), list[str]()
    if not faults:
        faults, notes = _try_settings(file)
    if as_json:
        print(json.dumps({"file": str(file), "faults": faults, "notes": notes}, indent=2))
    else:
        for line in faults:
            print(f"kvbm: {line}", file=sys.stderr)
        if not faults:
            print(f"{file} can be used")
        for line in notes:
            print(f"note: {line}", file=sys.stderr)
    raise typer.Exit(2 if faults else 0)


def _try_settings(file: Path) -> tuple[list[str], list[str]]:
    """What a manager cannot use in a file whose values can be read; and its settings that have no effect, choices that
    may surprise, and sizes above the machine's."""
    # Imported late: the other commands do not need the manager's code.
    check = importlib.import_module("kvbm.manager.settings_check")
    loaded = load_settings({}, file=file, memory_bytes=available_memory_bytes())
    if faults := check.settings_faults(loaded.settings):
        return [str(_named_in(file, fault)) for fault in faults], []
    return [], [*loaded.warnings, *loaded.notices, *check.size_warnings(loaded.settings)]


def _named_in(file: Path, fault: SettingsError) -> SettingsError:
    """The error with the name that a settings file has for the setting."""
    name = next((name for name, setting in FIELDS.items() if setting.variable == fault.field), "")
    return SettingsError(f"{file}: {name}", fault.value, fault.accepted) if name else fault


def parse_json(field: str, text: str) -> object:
    """The value of a JSON text, None for an empty one. Raises SettingsError, which names `field`."""
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingsError(field, text, f"JSON ({error})") from None


def as_document(loaded: LoadedSettings) -> dict[str, object]:
    """The same for JSON: `settings.<field>` has the `value`, its `origin` and the `variable` that sets it."""
    return {
        "settings": {
            name: {
                "value": shown(setting, getattr(loaded.settings, name)),
                "origin": loaded.origins[name],
                "variable": setting.variable,
            }
            for name, setting in FIELDS.items()
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
