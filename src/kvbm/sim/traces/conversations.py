"""Finds which request continues which conversation: traces rarely say it, but the chains of blocks show it."""

from __future__ import annotations

from kvbm.sim.traces.trace import Trace

NO_REQUEST = -1
_END_BLOCKS = 2


def predecessors(trace: Trace) -> list[int]:
    """For each request, the earlier one whose conversation it continues, or NO_REQUEST.

    A turn's prompt is the prompt before it, the answer, and new text. So the blocks that it shares with the past end
    where an earlier prompt ended (or a block before, where the last was not full), in blocks that were new then. The
    earlier request must have ended when this one arrived, as far as the trace says.
    """
    asked: set[int] = set()
    # Last blocks of prompts, each with the latest request for it; `owned` were new in the prompt that they ended.
    ends: dict[int, int] = {}
    owned: set[int] = set()
    found = []
    for number, request in enumerate(trace.requests):
        blocks = request.blocks
        known = next((i for i, block in enumerate(blocks) if block not in asked), len(blocks))
        predecessor = NO_REQUEST
        for block in reversed(blocks[max(known - _END_BLOCKS, 1) : known]):
            if block in ends:
                # The conversation has moved on: a later request that shares these blocks is a branch of it, or has
                # only the same system prompt.
                predecessor = ends.pop(block)
                break
        if predecessor >= 0:
            before = trace.requests[predecessor]
            if before.arrived_s + before.seconds > request.arrived_s:
                predecessor = NO_REQUEST
        found.append(predecessor)
        for block in blocks[-_END_BLOCKS:]:
            if block not in asked or block in owned:
                ends[block] = number
                owned.add(block)
        asked.update(blocks)
    return found
