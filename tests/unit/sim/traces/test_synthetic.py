"""Made-up conversations: what they promise of themselves."""

from __future__ import annotations

import pytest

from kvbm.sim.traces.conversations import predecessors
from kvbm.sim.traces.synthetic import ChatShape, chats


def test_the_same_seed_gives_the_same_trace() -> None:
    shape = ChatShape(conversations=30)
    assert chats(shape, 1).requests == chats(shape, 1).requests
    assert chats(shape, 1).requests != chats(shape, 2).requests


def test_requests_come_in_order_from_zero_with_full_blocks_only() -> None:
    trace = chats(ChatShape(conversations=50))
    times = [request.arrived_s for request in trace.requests]
    assert times[0] == 0.0
    assert times == sorted(times)
    for request in trace.requests:
        assert len(request.blocks) == request.prompt_tokens // trace.block_tokens
        assert request.seconds > 0.0


def test_equal_blocks_mean_equal_prefixes() -> None:
    trace = chats(ChatShape(conversations=100, edits=0.3))
    prefixes: dict[int, tuple[int, ...]] = {}
    for request in trace.requests:
        for i, block in enumerate(request.blocks):
            assert prefixes.setdefault(block, tuple(request.blocks[:i])) == tuple(request.blocks[:i])
    assert sorted(prefixes) == list(range(trace.unique_blocks))


def test_system_prompts_are_shared_and_popular_ones_far_more() -> None:
    trace = chats(ChatShape(conversations=400, applications=4))
    first = [request.blocks[0] for request in trace.requests]
    counts = sorted((first.count(block) for block in set(first)), reverse=True)
    assert len(counts) == 4
    assert counts[0] > 2 * counts[-1]


def test_turns_go_on_where_the_conversation_was() -> None:
    shape = ChatShape(conversations=200, turns=5.0, edits=0.0)
    trace = chats(shape)
    assert len(trace.requests) == pytest.approx(5.0 * shape.conversations, rel=0.2)
    followed = sum(before >= 0 for before in predecessors(trace))
    assert followed == pytest.approx(len(trace.requests) - shape.conversations, rel=0.1)


def test_edits_branch_off() -> None:
    straight, edited = (chats(ChatShape(conversations=100, edits=edits)) for edits in (0.0, 0.5))
    depth = [sum(len(r.blocks) for r in t.requests) / len(t.requests) for t in (straight, edited)]
    assert depth[1] < depth[0]


def test_time_is_scaled_and_requests_are_limited() -> None:
    shape = ChatShape(conversations=20)
    whole, part = chats(shape), chats(shape, 0, 2.0, 10)
    assert len(part.requests) == 10
    assert [r.arrived_s for r in part.requests] == [2.0 * r.arrived_s for r in whole.requests[:10]]
