"""What a setting is: its name in the environment, its flag, and how its text is read."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

COUNT_MAX = 2**31 - 1


class Kind(enum.Enum):
    """How the text of a setting is read; the value is what the reference calls it."""

    SIZE = "size"
    COUNT = "whole number"
    PORT = "port"
    SECONDS = "seconds"
    SWITCH = "switch"
    CHOICE = "choice"
    TEXT = "text"
    PATH = "path"
    SOCKET = "socket path"
    USERS = "user ids"
    LOG = "log filter"


class Setting(msgspec.Struct, frozen=True):
    """One field of `Settings` as users meet it.

    `flag` is that of `kvbm manager`, empty where the setting matters to engines only.
    `inverted` belongs to the variable alone: `DYN_KVBM_…_DISABLE_X=true` means that field x is false.
    `ours` marks a variable that the original does not have.
    `no_effect` says why this build reads the setting and does nothing with it: asking for it draws a warning.
    `reader` is who acts on it: an engine that names a shared manager draws a line for what only a manager reads, and
    the other way round.
    """

    field: str
    variable: str
    flag: str
    kind: Kind
    meaning: str
    minimum: int = 1
    maximum: int = COUNT_MAX
    choices: tuple[str, ...] = ()
    inverted: bool = False
    ours: bool = False
    no_effect: str = ""
    reader: Literal["manager", "engine", "both"] = "manager"
