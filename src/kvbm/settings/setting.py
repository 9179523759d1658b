"""`Setting`: the names of a setting, and how its text is read."""

from __future__ import annotations

import enum
from typing import Any, Literal, get_args, get_origin

import msgspec

from kvbm.settings.store_urls import HIDDEN, without_credentials

COUNT_MAX = 2**31 - 1


class Kind(enum.Enum):
    """The ways to read the text of a setting. The value is the name of the kind in the docs."""

    SIZE = "size"
    COUNT = "whole number"
    PORT = "port"
    SECONDS = "seconds"
    PART = "number, 0 to 1"
    SWITCH = "switch"
    CHOICE = "choice"
    TEXT = "text"
    PATH = "path"
    SOCKET = "socket path"
    USERS = "user ids"
    LISTEN = "address of this machine"
    ENDPOINT = "ZMQ endpoint"
    STORE = "URL of a store"
    NAME = "name"
    ADDRESS = "address, host:port"
    ADDRESSES = "addresses, host:port"
    URLS = "URLs"
    SECRET = "secret"
    LOG = "log filter"


class Setting(msgspec.Struct, frozen=True):
    """How users meet one field of `Settings`: an annotation of that field, next to the sentence that explains it.

    `flag` is that of `kvbm manager`, empty where the setting matters to engines only; `metavar` stands for its value.
    `kind` is named where the type of the field leaves it open: a `bool` is a switch, an `int` a whole number, a
    `float` a part of something, a `Literal` a choice, a `str` a text.
    `default_text` is the page's word for a default whose value says too little.
    `inverted` belongs to the variable alone: `DYN_KVBM_…_DISABLE_X=true` means that field x is false.
    `ours` marks a variable that the original does not have.
    `needs` is the part that must be on for the setting to have an effect; `beyond` is a store or a fleet.
    `reader` is the process that acts on it: a user who sets it for the other one gets a line that says so.
    `no_effect` is the reason why this build does not act on the setting; a user who sets it gets a warning with it.
    """

    variable: str
    flag: str = ""
    kind: Kind = Kind.TEXT
    minimum: int = 0
    maximum: int = COUNT_MAX
    choices: tuple[str, ...] = ()
    metavar: str = ""
    default_text: str = ""
    inverted: bool = False
    ours: bool = False
    needs: Literal["", "disk", "metrics", "events", "remote", "object", "fleet", "beyond"] = ""
    reader: Literal["manager", "engine", "both"] = "manager"
    no_effect: str = ""
    field: str = ""
    meaning: str = ""


def shown(setting: Setting, value: object) -> object:
    """The value as it may be printed: without what nobody shall read."""
    if not isinstance(value, str):
        return value
    if setting.kind is Kind.SECRET:
        return HIDDEN
    # An address that should have no user in it may have one.
    hides = setting.kind is Kind.STORE or ("@" in value and "://" in value)
    return without_credentials(value) if hides else value


def declared(field: str, hint: Any) -> Setting:
    """The setting of a field `field: Annotated[type, Setting(…), "meaning"]`, completed from the rest of that line."""
    setting: Setting
    setting, meaning = hint.__metadata__
    plain = hint.__origin__
    kind, choices = setting.kind, setting.choices
    if get_origin(plain) is Literal:
        kind, choices = Kind.CHOICE, get_args(plain)
    elif kind is Kind.TEXT:
        first, *_ = get_args(plain) or (plain,)
        kind = {bool: Kind.SWITCH, int: Kind.COUNT, float: Kind.PART}.get(first, kind)
    return msgspec.structs.replace(setting, field=field, meaning=meaning, kind=kind, choices=choices)
