"""`kvbm manager`: one cache for all engines of a node, in the foreground until it is told to stop."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbm.client.finder import SOCKET_NAME
from kvbm.observe.log import configure
from kvbm.runtime_dir import make_own_dir
from kvbm.settings import (
    FIELDS,
    Kind,
    available_memory_bytes,
    load_settings,
    manager_notices,
    parse_socket_path,
    process_environment,
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


def _option(field: str, metavar: str = "", meaning: str = "") -> Any:
    """The option of one setting; its value is read as text, so that errors are those of every source."""
    setting = FIELDS[field]
    meaning = meaning or setting.meaning
    text = f"{meaning[0].upper()}{meaning[1:]}. [{setting.variable}]"
    if setting.kind is Kind.SWITCH:
        bare = setting.flag.removeprefix("--")
        return typer.Option(f"--{bare}/--no-{bare}", help=text, show_default=False)
    default = {Kind.SIZE: "SIZE", Kind.PATH: "PATH", Kind.SOCKET: "PATH", Kind.COUNT: "N", Kind.PORT: "PORT"}
    return typer.Option(setting.flag, metavar=metavar or default.get(setting.kind, "TEXT"), help=text)


Text = str | None
Switch = bool | None


@app.command(epilog=_EXAMPLES)
def manager(
    host_bytes: Annotated[Text, _option("host_bytes")] = None,
    host_blocks: Annotated[Text, _option("host_blocks")] = None,
    disk_bytes: Annotated[Text, _option("disk_bytes")] = None,
    disk_blocks: Annotated[Text, _option("disk_blocks")] = None,
    disk_dir: Annotated[Text, _option("disk_dir", "DIR")] = None,
    disk_persist: Annotated[Switch, _option("disk_persist")] = None,
    disk_unowned_bytes: Annotated[Text, _option("disk_unowned_bytes")] = None,
    disk_zerofill_fallback: Annotated[Switch, _option("disk_zerofill_fallback")] = None,
    disk_o_direct: Annotated[Switch, _option("disk_o_direct")] = None,
    disk_offload_filter: Annotated[Switch, _option("disk_offload_filter")] = None,
    disk_admission: Annotated[Text, _option("disk_admission", "POLICY")] = None,
    disk_write_budget_bytes: Annotated[Text, _option("disk_write_budget_bytes")] = None,
    disk_write: Annotated[Text, _option("disk_write", "WHEN")] = None,
    disk_io_threads: Annotated[Text, _option("disk_io_threads")] = None,
    eviction: Annotated[Text, _option("eviction")] = None,
    staging_bytes: Annotated[Text, _option("staging_bytes")] = None,
    max_concurrent_transfers: Annotated[Text, _option("max_concurrent_transfers")] = None,
    max_transfer_batch_size: Annotated[Text, _option("max_transfer_batch_size")] = None,
    metrics: Annotated[Switch, _option("metrics")] = None,
    metrics_host: Annotated[Text, _option("metrics_host", "ADDRESS")] = None,
    metrics_port: Annotated[Text, _option("metrics_port")] = None,
    manager: Annotated[Text, _option("manager", meaning=_SOCKET)] = None,
    peer_uids: Annotated[Text, _option("peer_uids", "UIDS")] = None,
    runtime_dir: Annotated[Text, _option("runtime_dir", "DIR")] = None,
    log_level: Annotated[Text, _option("log_level", "LEVEL")] = None,
    namespaces: Annotated[
        int,
        typer.Option(min=1, max=64, metavar="N", help="Models, or versions of one, that share the tiers."),
    ] = 1,
    file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")
    ] = None,
) -> None:
    """Run a manager that the engines of this node share.

    It stays in the foreground. SIGTERM or Ctrl-C stops it; what the disk tier holds is kept.
    """
    overrides = {name: value for name, value in locals().items() if name in FIELDS}
    if metrics is None and (metrics_host or metrics_port):
        # Who names the address wants the page.
        overrides["metrics"] = True
    run(overrides, file, namespaces)


def run(overrides: dict[str, object], file: Path | None, namespaces: int) -> None:
    """Load the settings, say what engines must set, and serve until stopped."""
    loaded = load_settings(process_environment(), overrides, file, memory_bytes=available_memory_bytes())
    settings = loaded.settings
    socket_path = os.path.abspath(settings.manager or os.path.join(settings.runtime_dir, SOCKET_NAME))
    parse_socket_path(FIELDS["manager"].flag, socket_path)
    configure(settings.log_level)
    for line in (*loaded.warnings, *loaded.notices, *manager_notices(settings, loaded.origins)):
        log.warning("%s", line)
    if settings.trusted_peer_uids:
        # They have to get to the socket; what else lies there is for us alone.
        make_own_dir(os.path.dirname(socket_path), FIELDS["manager"].variable, mode=0o711)
    # The manager's code is not needed for --help or for a wrong setting.
    process = importlib.import_module("kvbm.manager.process")
    lock_fd = process.take_lock(socket_path)
    try:
        process.serve(
            settings,
            socket_path,
            namespaces,
            private=False,
            on_listening=lambda: print(
                f"engines use this manager with: {FIELDS['manager'].variable}={socket_path}", flush=True
            ),
        )
    finally:
        os.close(lock_fd)
