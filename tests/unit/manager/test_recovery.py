"""Blocks found at start: no slice is as long as their number."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from kvbm.block import Tier
from kvbm.hashing import chain_keys
from kvbm.manager.pool import SlotPool
from kvbm.manager.recovery import Recovery
from kvbm.policy import make_policy
from rigs.found_blocks import found_blocks

BLOCKS, AT_ONCE = 2048, 8


def test_a_slice_passes_over_few_runs_that_are_ranked_already() -> None:
    """The oldest block ends a chain of all others, each a run of its own: they are ranked before it."""
    keys = chain_keys(bytes(32), range(BLOCKS * 4), 4)[::-1]
    found = found_blocks((key, (keys[i + 1 :] or [None])[0], i) for i, key in enumerate(keys))
    pool = SlotPool(Tier.DISK, BLOCKS, make_policy("lru", BLOCKS))
    recovery = Recovery(pool, found, 1.0, blocks_at_once=AT_ONCE)
    for _ in recovery.index():
        pass
    lines = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not Recovery.rank.__code__:
            return None
        lines[-1] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in recovery.rank():
            lines.append(0)
    finally:
        sys.settrace(before)
    assert len(lines) >= 2 * BLOCKS / AT_ONCE, "in slices"
    assert max(lines) < 20 * AT_ONCE
    assert not any(pool.is_unranked(slot) for slot in range(BLOCKS))
