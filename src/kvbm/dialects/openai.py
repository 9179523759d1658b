"""OpenAI's fields for prompt caching, in chat completions and in responses.

- `prompt_cache_key` names what shares prefixes: for agents a conversation, for others perhaps a whole application. So
  every other name of a session is stronger.
- `prompt_cache_options` is `{"mode": "implicit" | "explicit", "ttl": "30m"}`. The time is a minimum. The implicit mode
  means the whole prompt, the explicit one a prefix that ends with a block with a `prompt_cache_breakpoint`.
- `prompt_cache_retention` is the older field, and a maximum: `"in_memory"` (an hour) or `"24h"`.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.dialects.marks import marks
from kvbm.dialects.raw import RawHint, seconds
from kvbm.hints import NEUTRAL_PRIORITY

DEFAULT_TTL = "30m"
IN_MEMORY_S = 3600
_IN_MEMORY = ("in_memory", "in-memory")


def of_openai(body: Mapping[str, object]) -> RawHint:
    """The key as a session, the time as a range."""
    hint: RawHint = {}
    if body.get("prompt_cache_key") is not None:
        hint["session"] = body["prompt_cache_key"]
    ranges = [found for found in (_least(body), _most(body)) if found is not None]
    if len(ranges) == 2 and ranges[0].keys() == {"min_ttl"}:
        ranges = [{**ranges[0], "max_ttl": ranges[1]["max_ttl"]}]
    if ranges:
        hint["retain"] = ranges
    return hint


def _least(body: Mapping[str, object]) -> RawHint | None:
    breakpoints = marks(body, "prompt_cache_breakpoint")
    options = body.get("prompt_cache_options")
    if not isinstance(options, dict):
        if not breakpoints:
            return None
        options = {}
    ttl = options.get("ttl")
    least: RawHint = {"min_ttl": seconds(DEFAULT_TTL if ttl is None else ttl)}
    if options.get("mode") != "explicit":
        return least
    return {**breakpoints[-1].extent, **least} if breakpoints else None


def _most(body: Mapping[str, object]) -> RawHint | None:
    """A maximum asks for nothing: its priority is that of tokens of which nobody said anything."""
    retention = body.get("prompt_cache_retention")
    if retention is None:
        return None
    most = IN_MEMORY_S if retention in _IN_MEMORY else seconds(retention)
    return {"priority": NEUTRAL_PRIORITY, "max_ttl": most}
