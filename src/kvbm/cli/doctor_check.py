"""`Check`: one line of `kvbm doctor`."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["ok", "advice", "fault"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, what was found, and, unless it is fine, what to do.

    `fault`: a part of KVBM does not work. `advice`: it works, and could be better. `measured` has the numbers behind
    the text, for programs; bytes, seconds and counts, as the names say.
    """

    name: str
    state: State
    found: str
    remedy: str = ""
    measured: dict[str, float | int | str] = {}


def ok(name: str, found: str, **measured: float | int | str) -> Check:
    """Nothing to do."""
    return Check(name=name, state="ok", found=found, measured=measured)


def advice(name: str, found: str, remedy: str, **measured: float | int | str) -> Check:
    """It works, and could be better."""
    return Check(name=name, state="advice", found=found, remedy=remedy, measured=measured)


def fault(name: str, found: str, remedy: str, **measured: float | int | str) -> Check:
    """It does not work."""
    return Check(name=name, state="fault", found=found, remedy=remedy, measured=measured)
