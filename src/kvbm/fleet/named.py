"""What the settings of a fleet name: this node, and its certificate."""

from __future__ import annotations

import socket
from pathlib import Path

from kvbm.errors import SettingsError
from kvbm.fleet.certificates import node_files
from kvbm.fleet.directory import refuse_name
from kvbm.fleet.tls import TlsFiles
from kvbm.settings import Settings, variable

DEFAULT_FLEET = "kvbm"
"""As `kvbm fleet cert` names one that nobody named."""


def node_name(settings: Settings) -> str:
    """This node's name. Raises SettingsError."""
    node = settings.fleet_node or socket.gethostname()
    refuse_name(variable("fleet_node"), node)
    return node


def fleet_name(settings: Settings) -> str:
    """The fleet's name, as certificates have it. Raises SettingsError."""
    fleet = settings.fleet or DEFAULT_FLEET
    refuse_name(variable("fleet"), fleet)
    return fleet


def certificates(settings: Settings) -> TlsFiles | None:
    """This node's certificate and its authority's; None without. Raises SettingsError where a file is missing."""
    where = settings.fleet_certs
    if where is None:
        return None
    files = node_files(Path(where), node_name(settings))
    for path in files:
        if not path.is_file():
            raise SettingsError(
                variable("fleet_certs"), where, f"a directory with {path.name} (kvbm fleet cert makes it)"
            )
    return files
