"""`kvbm doctor`: try out what the settings ask for on this machine, and say what to do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvbm.cli.config import AsJson, ConfigFile, ExtraConfig, parse_json
from kvbm.cli.doctor_check import Check, advice, ok
from kvbm.cli.doctor_device import check_device_round_trip
from kvbm.cli.doctor_disk import check_disk, existing_part
from kvbm.cli.doctor_fleet import check_fleet
from kvbm.cli.doctor_machine import (
    check_device,
    check_memory,
    check_page_locks,
    check_port,
    check_versions,
    gpu_bytes,
)
from kvbm.cli.doctor_managers import check_managers
from kvbm.cli.doctor_remote import check_remote
from kvbm.cli.doctor_round_trip import check_round_trip
from kvbm.errors import SettingsError
from kvbm.layout import LAYOUT_MAX
from kvbm.present.numbers import format_bytes
from kvbm.present.tables import json_text
from kvbm.settings import (
    LoadedSettings,
    available_memory_bytes,
    container_free_bytes,
    load_settings,
    parse_size,
    parse_socket_path,
    process_environment,
)

BLOCK_BYTES = 2_000_000
BLOCK_BYTES_MAX = 1 << 30
_EXAMPLES = """\b
Examples:
  kvbm doctor
  kvbm doctor --json
  kvbm doctor --config kvbm.toml --block 4MB --device-cache 40GB
"""

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog=_EXAMPLES)
def doctor(
    as_json: AsJson = False,
    file: ConfigFile = None,
    extra_config: ExtraConfig = "",
    manager: Annotated[
        str, typer.Option(metavar="SOCKET", help="Socket of a manager to look at, besides those found.")
    ] = "",
    block: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Size of one block of your model over all ranks; else that of a manager that runs, else 2MB.",
        ),
    ] = "",
    device_cache: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the engine's own KV cache, over all ranks.")
    ] = "0",
) -> None:
    """Try out what the settings ask for on this machine: one line for each check, with what to do.

    The exit status is 1 if a check is a fault, 0 if there is nothing but advice. What is tried leaves nothing behind.
    The settings are those of this shell and this directory: run it where the engine or the manager is started.
    """
    block_bytes = _size("--block", block, 1, BLOCK_BYTES_MAX) if block else 0
    device_bytes = _size("--device-cache", device_cache, 0, LAYOUT_MAX)
    if manager:
        parse_socket_path("--manager", manager)
    loaded = load_settings(
        process_environment(),
        {"manager": manager or None},
        file,
        extra_config=parse_json("--extra-config", extra_config),
        memory_bytes=available_memory_bytes(),
    )
    checks = examine(loaded, block_bytes, device_bytes)
    faults = sum(check.state == "fault" for check in checks)
    if as_json:
        print(json_text({"faults": faults, "checks": checks}))
    else:
        for check in checks:
            print(line_of(check))
        print(_summary(checks))
    raise typer.Exit(1 if faults else 0)


def examine(loaded: LoadedSettings, block_bytes: int, device_bytes: int) -> list[Check]:
    """All checks, in the order in which they are shown: the settings, the machine, the disk, the store, the fleet,
    the managers.

    `block_bytes` of 0 is that of a manager that runs.
    """
    settings = loaded.settings
    # Of the machine, and beside what this container uses already.
    free = (available_memory_bytes(), container_free_bytes())
    free_bytes, on_gpus = min((part for part in free if part is not None), default=None), gpu_bytes()
    managers = check_managers(settings)
    block_bytes = block_bytes or min(managers.block_bytes, BLOCK_BYTES_MAX) or BLOCK_BYTES
    there = existing_part(Path(settings.disk_dir)) if settings.disk_on else None
    disk = list(check_disk(settings, block_bytes))
    usable = (
        there
        if not any(check.name == "disk directory" and check.state == "fault" for check in disk)
        else None
    )
    return [
        *_check_settings(loaded, managers.answering > 0),
        check_memory(settings, block_bytes, free_bytes),
        check_device(settings, block_bytes, device_bytes, on_gpus),
        check_page_locks(settings, block_bytes, on_gpus),
        *disk,
        *check_remote(settings, time.time),
        *check_fleet(settings, time.time, managers.answering > 0),
        check_device_round_trip(block_bytes, on_gpus),
        *check_round_trip(settings, block_bytes, usable),
        check_port(settings, managers.answering > 0),
        *check_versions(),
        *managers.checks,
    ]


def _check_settings(loaded: LoadedSettings, managers_run: bool) -> list[Check]:
    """The lines that a manager or an engine logs at its start."""
    # The environment's origins name their variables; there is one file.
    sources = Counter(
        "environment" if origin.startswith("environment ") else origin
        for origin in loaded.origins.values()
        if origin != "default"
    )
    found = ", ".join(f"{count} from the {source}" for source, count in sources.items())
    found = found or "nothing is set: the defaults apply"
    if managers_run:
        found += "; a manager that runs keeps the settings of its own start"
    lines = [*loaded.warnings, *loaded.notices]
    return [
        ok("settings", f"{found} (`kvbm config show` prints them)"),
        *(advice("settings", line, "") for line in lines),
    ]


def line_of(check: Check) -> str:
    """One check for a person: what was checked, what was found, what to do."""
    remedy = f" -> {check.remedy}" if check.remedy else ""
    return f"{check.state.upper() if check.state != 'ok' else 'ok':<6}  {check.name}: {check.found}{remedy}"


def _summary(checks: Sequence[Check]) -> str:
    """The last line: the first thing that a person sees on a terminal."""
    faults = [check.name for check in checks if check.state == "fault"]
    hints = [check.name for check in checks if check.state == "advice"]
    parts = []
    if faults:
        parts.append(f"{len(faults)} fault{'s' * (len(faults) > 1)}: mend {', '.join(dict.fromkeys(faults))}")
    if hints:
        parts.append(
            f"{len(hints)} piece{'s' * (len(hints) > 1)} of advice: {', '.join(dict.fromkeys(hints))}"
        )
    return "; ".join(parts) or "All is well."


def _size(field: str, text: str, minimum: int, maximum: int) -> int:
    size = parse_size(field, text)
    if not minimum <= size <= maximum:
        raise SettingsError(field, text, f"a size from {format_bytes(minimum)} to {format_bytes(maximum)}")
    return size
