"""Which request answers which: traces rarely say it, but the chains of blocks do."""

from __future__ import annotations

from kvbm.sim.traces.trace import Trace

NO_REQUEST = -1
_END_BLOCKS = 2


def predecessors(trace: Trace) -> list[int]:
    """For each request, the earlier one whose conversation it goes on with, or NO_REQUEST.

    A turn's prompt is the one before it, the answer, and something new. So what it shares with the past ends where
    an earlier prompt ended (or a block before, where the last was not full), in blocks that this prompt brought. The
    earlier request must have been through when this one came, as far as the trace says.
    """
    asked: set[int] = set()
    # Last blocks of prompts, with who asked for them last; `owned` are those that came with the end of a prompt.
    ends: dict[int, int] = {}
    owned: set[int] = set()
    found = []
    for number, request in enumerate(trace.requests):
        blocks = request.blocks
        known = next((i for i, block in enumerate(blocks) if block not in asked), len(blocks))
        predecessor = NO_REQUEST
        for block in reversed(blocks[max(known - _END_BLOCKS, 1) : known]):
            if block in ends:
                # The conversation has moved on: whoever shares these blocks from now on is a branch of it, or a
                # stranger with the same system prompt.
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
