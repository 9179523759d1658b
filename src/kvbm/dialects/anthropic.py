"""Anthropic's Messages API: `cache_control` at the top level of the body.

The form is `{"type": "ephemeral", "ttl": "5m" | "1h"}`, five minutes without a `ttl`. For so long at least the whole
prompt is to be kept. A `cache_control` on a tool or a block ends a prefix whose tokens are not known before the chat
template has run; it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.dialects.raw import RawHint, seconds

DEFAULT_TTL = "5m"


def of_anthropic(body: Mapping[str, object]) -> RawHint:
    """The time that a body asks for."""
    return whole_prompt(body.get("cache_control"))


def whole_prompt(said: object) -> RawHint:
    """The range that a `cache_control` beside the prompt asks for."""
    if not isinstance(said, dict) or said.get("type", "ephemeral") != "ephemeral":
        return {}
    ttl = said.get("ttl")
    return {"retain": [{"min_ttl": seconds(DEFAULT_TTL if ttl is None else ttl)}]}
