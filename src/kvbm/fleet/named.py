"""What the settings of a fleet name: this node, and its certificate."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

from kvbm.clock import Clock
from kvbm.errors import SettingsError
from kvbm.fleet.directory import refuse_name
from kvbm.fleet.tls import AUTHORITY, CERTIFICATES_PAGE, TlsFiles, ending, node_files
from kvbm.settings import Settings, variable

log = logging.getLogger("kvbm.fleet")

DEFAULT_FLEET = "kvbm"
"""The name of a fleet where the settings have certificates and no name, as for engines over several nodes."""


def node_name(settings: Settings) -> str:
    """This node's name. Raises SettingsError."""
    node = settings.fleet_node or socket.gethostname()
    refuse_name(variable("fleet_node"), node)
    if node == AUTHORITY:
        raise SettingsError(
            variable("fleet_node"), node, "another name: the files of that one are the authority's"
        )
    return node


def fleet_name(settings: Settings) -> str:
    """The fleet's name, as certificates have it. Raises SettingsError."""
    fleet = settings.fleet or DEFAULT_FLEET
    refuse_name(variable("fleet"), fleet)
    return fleet


def certificates(settings: Settings, wall: Clock = time.time) -> TlsFiles | None:
    """This node's certificate and its authority's; None without. Raises SettingsError where a file is missing.

    One that ends soon by the system's clock `wall` has a line in the log.
    """
    where = settings.fleet_certs
    if where is None:
        return None
    files = node_files(Path(where), node_name(settings))
    for path in files:
        if not path.is_file():
            raise SettingsError(
                variable("fleet_certs"), where, f"a directory with {path.name} ({CERTIFICATES_PAGE})"
            )
    if line := ending(files, wall()):
        log.warning("%s", line)
    return files
