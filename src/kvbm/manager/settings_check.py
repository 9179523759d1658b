"""Finds the settings with which `kvbm manager` would not start, or no engine could be served.

The manager's start and `kvbm config check` share these checks. They call the code that opens each part, or its checks,
so that no rule stands twice. Nothing stays open, and no store or other node is asked. A port in use is no fault: the
manager that uses it may be the one whose settings are checked.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvbm.client.admin_http import refuse_address
from kvbm.client.finder import SOCKET_NAME
from kvbm.clock import monotonic
from kvbm.errors import SettingsError
from kvbm.fleet.listening import bind_error, refuse_listen_address
from kvbm.layout import PAGE_BYTES
from kvbm.manager.assembly import refuse_policies
from kvbm.manager.choices import bound_writes
from kvbm.manager.node_door import HARM as NODE_HARM
from kvbm.manager.node_door import node_tls
from kvbm.manager.peer_server import HARM as PEER_HARM
from kvbm.manager.remote_opening import RemoteOpening
from kvbm.policy import AdmitAll
from kvbm.settings import (
    Settings,
    container_limit_bytes,
    host_memory_field,
    parse_socket_path,
    variable,
)
from kvbm.tiers.host import refuse_beyond_memory
from kvbm.unix_sockets import refuse_socket_path


def socket_path(settings: Settings) -> str:
    """Where a shared manager with these settings listens."""
    return os.path.abspath(settings.manager or os.path.join(settings.runtime_dir, SOCKET_NAME))


def settings_faults(settings: Settings) -> list[SettingsError]:
    """Every fault, in the order of the start. Without one, a shared manager starts and serves engines."""
    faults: list[SettingsError] = []
    for check in _CHECKS:
        try:
            check(settings)
        except SettingsError as error:
            faults.append(error)
    return faults


def size_warnings(settings: Settings) -> list[str]:
    """Tiers larger than this machine's memory or disk: the manager starts, and refuses engines."""
    lines = []
    size_bytes = (settings.host_bytes or 0) if settings.host_on else settings.staging_bytes
    if not settings.host_blocks:
        try:
            refuse_beyond_memory(size_bytes, container_limit_bytes(), host_memory_field(settings))
        except SettingsError as error:
            lines.append(str(error))
    if settings.disk_bytes and not settings.disk_blocks:
        above = _nearest_directory(settings.disk_dir)
        with contextlib.suppress(OSError):  # `_refuse_disk` names it
            found = os.statvfs(above)
            total_bytes = found.f_frsize * found.f_blocks
            if settings.disk_bytes > total_bytes:
                accepted = f"the file system of {settings.disk_dir} has {total_bytes / 1e9:.2f} GB in all"
                lines.append(
                    str(
                        SettingsError(variable("disk_bytes"), f"{settings.disk_bytes / 1e9:.2f} GB", accepted)
                    )
                )
    return lines


def _refuse_socket(settings: Settings) -> None:
    field, path = variable("manager" if settings.manager else "runtime_dir"), socket_path(settings)
    parse_socket_path(field, path)
    refuse_socket_path(path, field)


def _refuse_sizes(settings: Settings) -> None:
    """Every block takes a page at least."""
    sizes = {"host_bytes": settings.host_bytes, "disk_bytes": settings.disk_bytes}
    if not settings.host_on:
        sizes["staging_bytes"] = settings.staging_bytes
    for field, size_bytes in sizes.items():
        counted = (field == "host_bytes" and settings.host_blocks) or (
            field == "disk_bytes" and settings.disk_blocks
        )
        if size_bytes and size_bytes < PAGE_BYTES and not counted:
            accepted = f"room for one block at least, which takes {PAGE_BYTES} bytes or more"
            raise SettingsError(variable(field), f"{size_bytes} bytes", accepted)


def _refuse_disk(settings: Settings) -> None:
    """The directory is made when the first engine comes."""
    if not settings.disk_on:
        return
    above, field = _nearest_directory(settings.disk_dir), variable("disk_dir")
    accepted = "a directory that this user can write to, or a path at which one can be made"
    if not os.path.isdir(above):
        raise SettingsError(field, settings.disk_dir, f"{accepted}; {above} is no directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise SettingsError(field, settings.disk_dir, f"{accepted}; {above} cannot be written to")
    bound_writes(
        variable("disk_write_budget_bytes"), settings.disk_write_budget_bytes, AdmitAll(), PAGE_BYTES, 0.0
    )


def _refuse_policies(settings: Settings) -> None:
    refuse_policies(settings, monotonic())


def _refuse_store(settings: Settings) -> None:
    if settings.remote_on:
        RemoteOpening(settings, monotonic)


def _refuse_fleet(settings: Settings) -> None:
    if not settings.fleet:
        return
    from kvbm.manager.fleet_side import FleetParts  # a manager in no fleet needs none of it

    parts = FleetParts(settings)
    if settings.fleet_listen:
        anywhere = settings.fleet_plain or parts.files is not None
        refuse_listen_address(variable("fleet_listen"), settings.fleet_listen, anywhere, PEER_HARM)


def _refuse_nodes(settings: Settings) -> None:
    if settings.node_listen is not None:
        anywhere = node_tls(settings) is not None or settings.fleet_plain
        refuse_listen_address(variable("node_listen"), settings.node_listen, anywhere, NODE_HARM)


def _refuse_metrics(settings: Settings) -> None:
    if not settings.metrics:
        return
    host, port = settings.metrics_host, settings.metrics_port
    accepted = "an address of this machine"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise SettingsError(variable("metrics_host"), host, f"{accepted} ({error})") from None
    if error_text := bind_error(family, address):
        raise SettingsError(variable("metrics_host"), f"{host}:{port}", f"{accepted} ({error_text})")


def _refuse_page(settings: Settings) -> None:
    if settings.admin_http is not None:
        refuse_address(settings.admin_http, settings.runtime_dir)


def _refuse_events(settings: Settings) -> None:
    if settings.events_endpoint is None:
        return
    from kvbm.events.publisher import refuse_endpoint  # needs ZMQ

    refuse_endpoint("events_endpoint", settings.events_endpoint)
    if settings.events_replay_endpoint is not None:
        refuse_endpoint("events_replay_endpoint", settings.events_replay_endpoint)


def _nearest_directory(path: str) -> Path:
    """The path, or the nearest one above it where there is anything."""
    start = Path(os.path.abspath(path))
    return next((each for each in (start, *start.parents) if _is_there(each)), start)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:
        return False
    return True


_CHECKS: tuple[Callable[[Settings], None], ...] = (
    _refuse_socket,
    _refuse_sizes,
    _refuse_disk,
    _refuse_policies,
    _refuse_store,
    _refuse_fleet,
    _refuse_nodes,
    _refuse_metrics,
    _refuse_page,
    _refuse_events,
)
