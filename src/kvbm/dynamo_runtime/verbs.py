"""The verbs of the original's controller, answered by a manager.

A request is what the original's client sends, the JSON of a Rust enum:

    {"Status": "G2"}         {"active_blocks": …, "inactive_blocks": …, "empty_blocks": …}
    {"ResetPool": "G2"}      {"ResetPool": null}, or an error's text in place of null
    {"ResetBlocks": …}       {"Error": …}: blocks are not dropped one by one here
    "ResetAll"               {"ResetAll": null}, or an error's text

G2 is host memory, G3 disk, summed over namespaces. As there, a reset is an error where blocks are in use; the others
are dropped all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbm.admin_protocol import Description, TierReport
from kvbm.errors import KvbmError
from kvbm.protocol import ResetReply

TIERS = {"G2": "host", "G3": "disk"}
ACCEPTED = '{"Status": "G2" or "G3"}, {"ResetPool": "G2" or "G3"} or "ResetAll"'


class Refusal(Exception):
    """What the caller gets in place of an answer: one line."""


def answer(
    request: object, describe: Callable[[], Description], reset: Callable[[str], ResetReply]
) -> dict[str, Any]:
    """The answer to one request. `reset` drops the blocks of a tier (empty: of all) that are not in use."""
    verb, level = next(iter(request.items())) if isinstance(request, dict) and request else (request, None)
    try:
        if verb == "Status":
            return _status(_tier(level, describe()))
        if verb == "ResetPool":
            _tier(level, describe())
            return {verb: _left(reset(TIERS[str(level)]))}
        if verb == "ResetAll":
            return {verb: _left(reset(""))}
        if verb == "ResetBlocks":
            raise Refusal(
                "single blocks cannot be dropped; ResetPool drops all of a tier that are not in use"
            )
        raise Refusal(f"{request!r} is no request; accepted are {ACCEPTED}")
    except (Refusal, KvbmError) as error:
        return {str(verb) if verb in ("ResetPool", "ResetAll") else "Error": str(error)}


def _tier(level: object, description: Description) -> list[TierReport]:
    """That tier of all namespaces."""
    if level == "G1":
        raise Refusal("G1, the device's cache, is the engine's: reset it with /reset_prefix_cache")
    if not isinstance(level, str) or level not in TIERS:
        raise Refusal(f"{level!r} is no tier; accepted are G2 (host memory) and G3 (disk)")
    found = [tier for space in description.spaces for tier in space.tiers if tier.tier == TIERS[level]]
    if description.spaces and not found:
        raise Refusal(f"this manager has no {level}")
    return found


def _status(tiers: list[TierReport]) -> dict[str, Any]:
    """As the original counts: blocks that a request uses, blocks that are kept for later ones, and free ones."""
    active = sum(tier.leased + tier.filling for tier in tiers)
    held = sum(tier.filling + tier.resident for tier in tiers)
    return {
        "active_blocks": active,
        "inactive_blocks": held - active,
        "empty_blocks": sum(tier.free for tier in tiers),
    }


def _left(reply: ResetReply) -> str | None:
    if reply.in_use:
        return f"{reply.in_use} blocks stay because they are in use"
    return f"blocks may come back if the manager is killed: {reply.undone}" if reply.undone else None
