"""Anthropic's Messages API: `cache_control` on tools, blocks and messages, or at the top level of the body.

The form is `{"type": "ephemeral", "ttl": "5m" | "1h"}`, five minutes where no time is said. For so long at least the
prefix that ends with the marked block is to be kept. At the top level it stands for a mark on the last block. Proxies
pass the same marks inside the chat completions of OpenAI.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbm.dialects.marks import Mark, marks
from kvbm.dialects.raw import SHARE, RawHint, seconds
from kvbm.hints import RANGES_MAX

DEFAULT_TTL = "5m"


def of_anthropic(body: Mapping[str, object]) -> RawHint:
    """The ranges that the marks of a body ask for."""
    return _retained([*marks(body, "cache_control"), Mark(body.get("cache_control"), {})])


def whole_prompt(said: object) -> RawHint:
    """The range that a `cache_control` beside the prompt asks for."""
    return _retained([Mark(said, {})])


def _retained(found: Iterable[Mark]) -> RawHint:
    """One range for each time: the longest one, unless another one is as long and is to be kept for longer."""
    by_time: dict[int | None, RawHint] = {}
    for said, extent in found:
        if not isinstance(said, dict) or said.get("type", "ephemeral") != "ephemeral":
            continue
        ttl = said.get("ttl")
        least = seconds(DEFAULT_TTL if ttl is None else ttl)
        # What is no time is rejected later. Once is enough: a body can have any number of them, and of times too.
        time = least if isinstance(least, int) else None
        if time in by_time or len(by_time) <= RANGES_MAX:
            by_time[time] = {**extent, "min_ttl": least}
    ranges, reach = [], 0.0
    for least in sorted((time for time in by_time if time is not None), reverse=True):
        share = by_time[least].get(SHARE, 1.0)
        if isinstance(share, float) and share > reach:
            reach = share
            ranges.append(by_time[least])
    ranges += [by_time[None]] if None in by_time else []
    return {"retain": ranges} if ranges else {}
