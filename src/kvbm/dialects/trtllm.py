"""TensorRT-LLM's retention priorities, as its connector sees them.

A request's `KvCacheRetentionConfig` gives ranges of tokens a priority from 0 to 100. The engine gives each block that
of its range, and tells a connector of these alone (`RequestData.priorities`), not of their durations. Blocks of no
range have the default.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.dialects.raw import RawHint
from kvbm.hints import NEUTRAL_PRIORITY, RANGES_MAX


def hint_of_priorities(priorities: object, block_tokens: int, first_block: int = 0) -> RawHint:
    """Ranges of blocks with one priority each; the default says nothing. `priorities` are those of the blocks from
    number `first_block` on, or None."""
    if not isinstance(priorities, Sequence) or isinstance(priorities, str | bytes):
        return {}
    ranges: list[object] = []
    begun, end = 0, len(priorities)
    # One range beyond the bound is kept, so that `read_hint` says that there were more.
    while begun < end and len(ranges) <= RANGES_MAX:
        priority = priorities[begun]
        stop = begun + 1
        while stop < end and priorities[stop] == priority:
            stop += 1
        if priority is not None and priority != NEUTRAL_PRIORITY:
            first, last = (first_block + begun) * block_tokens, (first_block + stop) * block_tokens
            ranges.append({"start": first, "end": last, "priority": priority})
        begun = stop
    return {"retain": ranges} if ranges else {}
