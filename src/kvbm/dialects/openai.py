"""OpenAI's fields for prompt caching, in chat completions and in responses.

- `prompt_cache_key` names what shares prefixes: for agents a conversation, for others perhaps a whole application. So
  every other name of a session is stronger.
- `prompt_cache_options` is `{"mode": "implicit" | "explicit", "ttl": "30m"}`. The time is a minimum. The implicit mode
  means the whole prompt. The explicit one means a prefix that ends with a block with a `prompt_cache_breakpoint`, whose
  tokens are not known before the chat template has run: it is ignored.
- `prompt_cache_retention` is the older field, and a maximum: `"in_memory"` (an hour) or `"24h"`.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    least, most = _least(body), _most(body)
    ranges = (
        [{**least, "max_ttl": most["max_ttl"]}]
        if least and most
        else [each for each in (least, most) if each]
    )
    if ranges:
        hint["retain"] = ranges
    return hint


def _least(body: Mapping[str, object]) -> RawHint:
    options = body.get("prompt_cache_options")
    if not isinstance(options, dict) or options.get("mode") == "explicit":
        return {}
    ttl = options.get("ttl")
    return {"min_ttl": seconds(DEFAULT_TTL if ttl is None else ttl)}


def _most(body: Mapping[str, object]) -> RawHint:
    """A maximum asks for nothing: its priority is that of tokens of which nobody said anything."""
    retention = body.get("prompt_cache_retention")
    if retention is None:
        return {}
    most = IN_MEMORY_S if retention in _IN_MEMORY else seconds(retention)
    return {"priority": NEUTRAL_PRIORITY, "max_ttl": most}
