"""What a client may say about a request's future: one form, read from what somebody sent.

A hint biases and never locks, and never enters a key. It comes from outside, so every part of it is accepted, clipped
to a bound, or rejected, each with a reason; nothing here raises. Whoever asks counts the outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3

NAME_CHARACTERS_MAX = 256
EXPECT_S_MAX = 86_400.0
RANGES_MAX = 32
TOKENS_MAX = 1 << 31
PRIORITY_MAX = 100
NEUTRAL_PRIORITY = 35
"""That of tokens of which nobody said anything: the default of TensorRT-LLM, on whose scale these priorities are."""
TTL_S_MAX = 7 * 86_400.0
VERDICTS_MAX = 2 * RANGES_MAX
REASON_CHARACTERS_MAX = 200
UNKNOWN = "unknown"
"""Stands for all parts that the form does not have, so that their names need no counters."""
WHOLE = "hint"
"""Stands for the hint itself, where it is not a mapping."""


class Outcome(Enum):
    """What became of a part."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REJECTED = "rejected"


class Why(Enum):
    """Why a part was not taken as it was said: a word for counters. `Verdict.reason` says more."""

    NONE = "none"
    FORM = "form"
    """It is not what the form has there."""
    BOUND = "bound"
    """It is more than may be said."""
    UNKNOWN = "unknown"
    """The form has no such part."""
    BUDGET = "budget"
    """What may be retained, or brought up, in this namespace or for this salt is used up."""
    DOUBTED = "doubted"
    """The client was wrong too often."""
    NOTHING = "nothing"
    """There is nothing that it could be done to."""


class Verdict(NamedTuple):
    """The outcome of one part; `reason` is empty where it was accepted, and `why` the same in one word. `part` is a
    field of `Hint`, `UNKNOWN` or `WHOLE`: ranges are all `retain`."""

    part: str
    outcome: Outcome
    reason: str = ""
    why: Why = Why.NONE


class Retain(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens from `start` up to `end` (None: to its end) are worth more: `priority` from 0 to 100, where
    `NEUTRAL_PRIORITY` says nothing. `min_ttl` and `max_ttl` say for how many seconds at least and at most."""

    start: int = 0
    end: int | None = None
    priority: int = 50
    min_ttl: float = 0.0
    max_ttl: float = TTL_S_MAX


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """What was said, within bounds; None, False or empty where nothing was.

    `session` names the conversation, `parent` the one that it belongs to. With `final` it does not go on; `expect_s` is
    in how many seconds after the request's end it does. `prefetch`, `demote`: bring the blocks up, or let them go down.
    `store`: False says that the request's blocks need not be kept.
    """

    session: str | None = None
    parent: str | None = None
    final: bool = False
    expect_s: float | None = None
    retain: tuple[Retain, ...] = ()
    prefetch: bool = False
    demote: bool = False
    store: bool = True


NO_HINT = Hint()
PARTS = (*Hint.__struct_fields__, UNKNOWN, WHOLE)
"""What a verdict can be of."""


class ReadHint(NamedTuple):
    """A hint and a verdict for every part of it that was said."""

    hint: Hint = NO_HINT
    verdicts: tuple[Verdict, ...] = ()


NOTHING_READ = ReadHint()


class ClientHint(NamedTuple):
    """Who asks, what they say, and what became of each part of that so far. `tenant` is a digest of the request's cache
    salt; empty without one."""

    tenant: str = ""
    hint: Hint = NO_HINT
    verdicts: tuple[Verdict, ...] = ()


UNHINTED = ClientHint()


class _Unusable(Exception):
    """The reason why a value is rejected; caught here."""


_Checked: TypeAlias = tuple[object, str]
"""A value within bounds, and why it was clipped, if it was."""


def read_hint(value: object) -> ReadHint:
    """The hint in a decoded value that may be anything. A part that is null counts as not said."""
    if value is None:
        return NOTHING_READ
    if not isinstance(value, dict):
        return ReadHint(NO_HINT, (Verdict(WHOLE, Outcome.REJECTED, "not a mapping", Why.FORM),))
    found: dict[str, object] = {}
    verdicts: list[Verdict] = []
    for part, check in _PARTS.items():
        if value.get(part) is not None:
            said, verdict = _checked(part, check, value[part])
            verdicts.append(verdict)
            if verdict.outcome is not Outcome.REJECTED:
                found[part] = said
    if value.get("retain") is not None:
        found["retain"] = _ranges(value["retain"], verdicts)
    if any(part not in Hint.__struct_fields__ for part in value):
        verdicts.append(Verdict(UNKNOWN, Outcome.REJECTED, "no such part", Why.UNKNOWN))
    return ReadHint(msgspec.structs.replace(NO_HINT, **found), tuple(verdicts))


def as_mapping(hint: Hint) -> dict[str, Any]:
    """The hint as messages carry it: what `read_hint` reads, with no part that was not said."""
    said = {
        part: value for part, value in msgspec.structs.asdict(hint).items() if value != _NOTHING_SAID[part]
    }
    if hint.retain:
        said["retain"] = [msgspec.structs.asdict(each) for each in hint.retain]
    return said


def as_tuples(verdicts: Iterable[Verdict]) -> tuple[tuple[str, str, str, str], ...]:
    """Verdicts as messages carry them."""
    return tuple((part, outcome.value, reason, why.value) for part, outcome, reason, why in verdicts)


def from_tuples(told: Iterable[tuple[str, str, str, str]]) -> tuple[Verdict, ...]:
    """The inverse of `as_tuples`, at most `VERDICTS_MAX` of them; what is no verdict is left out."""
    found = islice(told, VERDICTS_MAX)
    return tuple(
        Verdict(part, _OUTCOMES[outcome], reason[:REASON_CHARACTERS_MAX], _WHYS[why])
        for part, outcome, reason, why in found
        if part in PARTS and outcome in _OUTCOMES and why in _WHYS
    )


def latest(first: tuple[Verdict, ...], later: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    """The verdicts of `first`, but those of parts of which `later` has others."""
    parts = {verdict.part for verdict in later}
    return (*(each for each in first if each.part not in parts), *later) if later else first


def tenant_digest(salt: str | bytes) -> str:
    """How a request's cache salt is named where the text need not be known: 16 hex digits."""
    text = salt.encode(errors="surrogatepass") if isinstance(salt, str) else salt
    return blake3(text).hexdigest(length=8)


_OUTCOMES = {each.value: each for each in Outcome}
_WHYS = {each.value: each for each in Why}
_NOTHING_SAID = msgspec.structs.asdict(NO_HINT)


def _checked(part: str, check: Callable[[object], _Checked], value: object) -> tuple[object, Verdict]:
    try:
        said, clipped = check(value)
    except _Unusable as error:
        return None, Verdict(part, Outcome.REJECTED, str(error), Why.FORM)
    if clipped:
        return said, Verdict(part, Outcome.CLIPPED, clipped, Why.BOUND)
    return said, Verdict(part, Outcome.ACCEPTED)


def _ranges(value: object, verdicts: list[Verdict]) -> tuple[Retain, ...]:
    """The ranges that can be used; one verdict for each, and one for those beyond the bound."""
    if not isinstance(value, list):
        verdicts.append(Verdict("retain", Outcome.REJECTED, "not a list", Why.FORM))
        return ()
    found = []
    for each in value[:RANGES_MAX]:
        said, verdict = _checked("retain", _range, each)
        verdicts.append(verdict)
        if isinstance(said, Retain):
            found.append(said)
    if len(value) > RANGES_MAX:
        verdicts.append(Verdict("retain", Outcome.CLIPPED, f"more than {RANGES_MAX} ranges", Why.BOUND))
    return tuple(found)


def _range(value: object) -> _Checked:
    if not isinstance(value, dict):
        raise _Unusable("a range is not a mapping")
    if any(part not in _RANGE_PARTS for part in value):
        raise _Unusable("a range has an unknown part")
    found: dict[str, object] = {}
    reasons = []
    for part, check in _RANGE_PARTS.items():
        if value.get(part) is not None:
            found[part], reason = check(value[part])
            reasons += [f"{part}: {reason}"] if reason else []
    said = msgspec.structs.replace(Retain(), **found)
    if said.end is not None and said.end <= said.start:
        raise _Unusable("a range is empty")
    if said.min_ttl > said.max_ttl:
        said = msgspec.structs.replace(said, min_ttl=said.max_ttl)
        reasons.append("min_ttl: above max_ttl")
    return said, ", ".join(reasons)


def _name(value: object) -> _Checked:
    # A name that was cut would be that of another conversation.
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARACTERS_MAX or not value.isprintable():
        raise _Unusable(f"not 1 to {NAME_CHARACTERS_MAX} printable characters")
    return value, ""


def _flag(value: object) -> _Checked:
    if not isinstance(value, bool):
        raise _Unusable("not true or false")
    return value, ""


def _seconds(most: float) -> Callable[[object], _Checked]:
    def check(value: object) -> _Checked:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Unusable("not a number")
        if isinstance(value, float) and not isfinite(value):
            raise _Unusable("not finite")
        if value < 0:
            raise _Unusable("below 0")
        return (most, f"above {most:.0f} s") if value > most else (float(value), "")

    return check


def _whole(most: int) -> Callable[[object], _Checked]:
    def check(value: object) -> _Checked:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Unusable("not a whole number")
        if value < 0:
            raise _Unusable("below 0")
        return (most, f"above {most}") if value > most else (value, "")

    return check


_PARTS: dict[str, Callable[[object], _Checked]] = {
    "session": _name,
    "parent": _name,
    "final": _flag,
    "expect_s": _seconds(EXPECT_S_MAX),
    "prefetch": _flag,
    "demote": _flag,
    "store": _flag,
}
_RANGE_PARTS: dict[str, Callable[[object], _Checked]] = {
    "start": _whole(TOKENS_MAX),
    "end": _whole(TOKENS_MAX),
    "priority": _whole(PRIORITY_MAX),
    "min_ttl": _seconds(TTL_S_MAX),
    "max_ttl": _seconds(TTL_S_MAX),
}
