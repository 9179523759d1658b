"""A trace in two halves, each replayed from a cold start: a choice made on one can be tried on the other.

Where requests fall into many trees of blocks (sessions that share nothing), every other tree goes into each half, by
its first request. Where all of them begin alike, the halves are those of time.
"""

from __future__ import annotations

from collections import Counter

from kvbm.sim.traces.trace import Trace, TraceBuilder, TraceRequest

TREES_MIN = 20
TREE_SHARE_MAX = 0.25
"""A tree with a larger share of the requests says that they do not fall apart."""


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The two halves: of the sessions if there are sessions, else of the time."""
    trees = Counter(request.blocks[0] for request in trace.requests)
    largest = max(trees.values(), default=0)
    if len(trees) >= TREES_MIN and largest <= TREE_SHARE_MAX * len(trace.requests):
        second = set(list(trees)[1::2])  # in the order in which they begin
        parts = [request.blocks[0] in second for request in trace.requests]
        names = ("odd sessions", "even sessions")
    else:
        parts = [request.arrived_s >= trace.seconds / 2 for request in trace.requests]
        names = ("first half", "second half")
    first = _part(trace, names[0], [r for r, later in zip(trace.requests, parts, strict=True) if not later])
    return first, _part(trace, names[1], [r for r, later in zip(trace.requests, parts, strict=True) if later])


def _part(trace: Trace, name: str, requests: list[TraceRequest]) -> Trace:
    builder = TraceBuilder(f"{trace.name}, {name}", trace.block_tokens)
    for request in requests:
        builder.add(
            request.arrived_s, request.blocks, request.prompt_tokens, request.output_tokens, request.seconds
        )
    return builder.build()
