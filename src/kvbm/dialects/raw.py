"""The raw form that every dialect is translated to: a dict as `hints.read_hint` takes it, not checked yet.

What a dialect cannot use is passed on as it came, and `read_hint` rejects it with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil
from typing import TypeAlias

from kvbm.hints import NEUTRAL_PRIORITY, PRIORITY_MAX, RANGES_MAX

RawHint: TypeAlias = dict[str, object]
"""Parts of `hints.Hint` by name, of any type; empty where nothing was said."""

SHARE = "end_share"
"""In a range of our own form instead of `end`: the end as a share of the prompt, by clients that count no tokens."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def over(*hints: RawHint) -> RawHint:
    """The strongest first: part by part, what the first one says that says something."""
    found: RawHint = {}
    for hint in hints:
        for part, said in hint.items():
            if found.get(part) is None and said is not None:
                found[part] = said
    return found


def joined(*hints: RawHint) -> RawHint:
    """As `over`, but ranges of all hints are kept: one dialect speaks of a priority, another one of a time.

    Ranges of the same extent become one, part by part.
    """
    found = over(*hints)
    lists = [ranges for hint in hints if isinstance(ranges := hint.get("retain"), list)]
    if len(lists) > 1:
        found["retain"] = _joined_ranges([each for ranges in lists for each in ranges])
    return found


def _joined_ranges(ranges: Sequence[object]) -> list[object]:
    found: list[object] = []
    for each in ranges:
        for place, stronger in enumerate(found):
            if isinstance(each, dict) and isinstance(stronger, dict) and _same_extent(each, stronger):
                found[place] = {**each, **stronger}
                break
        else:
            found.append(each)
    return found


def _same_extent(one: RawHint, other: RawHint) -> bool:
    return all(one.get(name) == other.get(name) for name in ("start", "end", SHARE))


def resolved(hint: RawHint, prompt_tokens: int) -> RawHint:
    """The hint with ends in tokens where they were shares of the prompt."""
    ranges = hint.get("retain")
    if not isinstance(ranges, list) or not any(isinstance(each, dict) and SHARE in each for each in ranges):
        return hint
    # Those beyond the bound are not read.
    counted = [_resolved_range(each, prompt_tokens) for each in ranges[:RANGES_MAX]]
    return {**hint, "retain": counted + ranges[RANGES_MAX:]}


def _resolved_range(each: object, prompt_tokens: int) -> object:
    if not isinstance(each, dict) or "end" in each:
        return each
    share = each.get(SHARE)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        return each
    known = {name: said for name, said in each.items() if name != SHARE}
    return known if share == 1 else {**known, "end": max(1, ceil(share * prompt_tokens))}


def seconds(duration: object) -> object:
    """`"30m"` in seconds; what is no duration, as it came."""
    if isinstance(duration, str) and (match := re.fullmatch(r"([0-9]{1,9})([smhd])", duration)):
        return int(match[1]) * _UNITS[match[2]]
    return duration


def flag(said: object) -> object:
    """A boolean where only scalars or text can be said; what is none, as it came."""
    if isinstance(said, str):
        word = said.strip().lower()
        return True if word in ("true", "1") else False if word in ("false", "0") else said
    if isinstance(said, int | float) and said in (0, 1):
        return bool(said)
    return said


def whole_number(said: object) -> object:
    """A number in text, as headers have them; what is none, as it came."""
    return int(said) if isinstance(said, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", said) else said


def retained_by_priority(priority: object) -> RawHint:
    """The whole prompt, worth more by a request's priority, where higher is better and 0 says nothing.

    Such priorities have no bounds. Each step counts as one of ours, from the neutral one on. They order a queue: a low
    one says that a request may wait, and nothing of whether its conversation goes on.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        return {} if priority is None else {"retain": [{"priority": priority}]}
    if priority <= 0:
        return {}
    return {"retain": [{"priority": min(PRIORITY_MAX, NEUTRAL_PRIORITY + priority)}]}
