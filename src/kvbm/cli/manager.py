"""`kvbm manager`: one cache for all engines of a node, in the foreground until a signal stops it."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbm.client.finder import SOCKET_NAME
from kvbm.observe.log import configure
from kvbm.runtime_dir import make_own_dir, make_runtime_dir
from kvbm.settings import (
    FIELDS,
    Kind,
    Setting,
    available_memory_bytes,
    load_settings,
    manager_notices,
    process_environment,
    variable,
)

_SOCKET = f"socket to listen on; unset, {SOCKET_NAME} in the runtime directory"

app = typer.Typer(rich_markup_mode=None)
log = logging.getLogger("kvbm.manager")

_EXAMPLES = """\b
Examples:
  kvbm manager --host-memory 20GB
  kvbm manager --host-memory 4GB --disk 100GB --disk-dir /mnt/nvme/kvbm --metrics
Then start each engine with the DYN_KVBM_MANAGER=... line that this prints.
"""


_METAVARS = {
    Kind.SIZE: "SIZE",
    Kind.COUNT: "N",
    Kind.PART: "PART",
    Kind.PORT: "PORT",
    Kind.PATH: "DIR",
    Kind.SOCKET: "PATH",
    Kind.USERS: "UIDS",
    Kind.LOG: "LEVEL",
}


def _parameter(setting: Setting) -> inspect.Parameter:
    """The option of one setting. Its value is taken as text, so that every source has the same errors."""
    meaning = _SOCKET if setting.field == "manager" else setting.meaning
    text = f"{meaning[0].upper()}{meaning[1:]}. [{setting.variable}]"
    option: Any
    if setting.kind is Kind.SWITCH:
        bare = setting.flag.removeprefix("--")
        option = typer.Option(f"--{bare}/--no-{bare}", help=text, show_default=False)
    else:
        metavar = setting.metavar or _METAVARS.get(setting.kind, "TEXT")
        option = typer.Option(setting.flag, metavar=metavar, help=text)
    value_type = bool if setting.kind is Kind.SWITCH else str
    return _keyword(setting.field, Annotated[value_type | None, option], None)


def _keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _manager(file: Path | None, namespaces: int, **overrides: object) -> None:
    """Run a manager that the engines of this node share.

    It stays in the foreground. SIGTERM, Ctrl-C or a closed terminal stops it; the blocks in the disk tier are kept.
    """
    if overrides["metrics"] is None and (overrides["metrics_host"] or overrides["metrics_port"]):
        # A user who sets the address wants the page.
        overrides["metrics"] = True
    run(overrides, file, namespaces)


_NAMESPACES = typer.Option(
    min=1, max=64, metavar="N", help="Models, or versions of one, that share the tiers."
)
_FILE = typer.Option("--config", metavar="FILE", help="Settings file (TOML).")

# Typer takes the options from the signature: those of the settings, then the command's own.
_manager.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # functions take any attribute
    [
        *(_parameter(setting) for setting in FIELDS.values() if setting.flag),
        _keyword("namespaces", Annotated[int, _NAMESPACES], 1),
        _keyword("file", Annotated[Path | None, _FILE], None),
    ]
)
app.command("manager", epilog=_EXAMPLES)(_manager)


def run(overrides: dict[str, object], file: Path | None, namespaces: int) -> None:
    """Load the settings, print what engines must set, and serve until a signal comes."""
    loaded = load_settings(process_environment(), overrides, file, memory_bytes=available_memory_bytes())
    settings = loaded.settings
    # Imported late: `--help` and the error for a wrong value do not need the manager's code.
    check = importlib.import_module("kvbm.manager.settings_check")
    for fault in check.settings_faults(settings):
        raise fault
    socket_path = check.socket_path(settings)
    configure(settings.log_level)
    notices = (*loaded.notices, *manager_notices(settings, loaded.origins), *check.size_warnings(settings))
    for line in (*loaded.warnings, *notices):
        log.warning("%s", line)
    if not settings.manager:
        make_runtime_dir(settings.runtime_dir)
    if settings.trusted_peer_uids:
        # Other users must reach the socket, but nothing else in the directory.
        make_own_dir(os.path.dirname(socket_path), variable("manager"), mode=0o711)
    process = importlib.import_module("kvbm.manager.process")
    lock_fd = process.take_lock(socket_path)
    try:
        process.serve(
            settings,
            socket_path,
            namespaces,
            private=False,
            on_listening=lambda: print(
                f"engines use this manager with: {variable('manager')}={socket_path}", flush=True
            ),
        )
    finally:
        os.close(lock_fd)
