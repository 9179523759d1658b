"""Replays with several groups, against a search that tries every boundary, and against the manager's own space."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbm.block import BlockKey
from kvbm.grouping import Grouping
from kvbm.groups import Group, GroupKind
from kvbm.hashing import split_keys
from kvbm.layout import BlockLayout
from kvbm.policy import LeafFirstLru, make_policy
from kvbm.sim.replay.grouped import GroupedTier, grouped_replay, tails
from kvbm.sim.traces.trace import Trace, TraceBuilder
from kvbm.slices import advance
from rigs.property_tests import scale_examples
from rigs.space import ME, Bench
from rigs.traces import random_trace

FULL = Group()
WINDOW = Group(kind=GroupKind.WINDOW, reach=2)
CHUNK = Group(kind=GroupKind.CHUNK, reach=3)
STATE = Group(kind=GroupKind.STATE)
MODELS = (
    (FULL,),
    (FULL, WINDOW),
    (FULL, WINDOW, WINDOW),
    (FULL, CHUNK),
    (FULL, STATE, STATE),
    (FULL, Group(kind=GroupKind.STATE, span=2)),
    (WINDOW,),
)


def endless(trace: Trace, groups: Sequence[Group]) -> list[int]:
    """What each request hits where nothing is ever given up, by a search through all boundaries and sets of blocks."""
    grouping = Grouping(groups)
    held: set[tuple[int, int]] = set()  # (group, name of the block's last block of the trace)
    found = []

    def names(blocks: Sequence[int], boundary: int) -> set[tuple[int, int]]:
        needed = set()
        for number, group in enumerate(groups):
            for block in group.needed(boundary):
                needed.add((number, blocks[(block + 1) * group.span - 1]))
        return needed

    for request in trace.requests:
        blocks = request.blocks
        boundaries = range(0, len(blocks) + 1, grouping.step)
        hit = max(boundary for boundary in boundaries if names(blocks, boundary) <= held)
        full = max(
            boundary
            for boundary in boundaries
            if {each for each in names(blocks, boundary) if groups[each[0]] == FULL} <= held
        )
        found.append(hit)
        last = boundaries[-1]
        held |= {each for each in names(blocks, last) if groups[each[0]] == FULL}
        ends = {
            request.prompt_tokens // trace.block_tokens,
            (request.prompt_tokens - 1) // trace.block_tokens,
        }
        for end in (end - end % grouping.step for end in ends):
            held |= names(blocks, end) if end > hit else set()  # before that nothing was computed
        forked = {each for each in names(blocks, full) if groups[each[0]].kind is not GroupKind.STATE}
        held |= forked if full > hit else set()
    return found


@settings(max_examples=scale_examples(60), deadline=None)
@given(seed=st.integers(0, 10_000), model=st.sampled_from(MODELS))
def test_a_cache_for_everything_hits_what_the_rules_say(seed: int, model: tuple[Group, ...]) -> None:
    trace = random_trace(seed)
    room = trace.unique_blocks * len(model)
    found = grouped_replay(trace, Grouping(model), room, LeafFirstLru(room))
    assert list(found.hits_by_request) == endless(trace, model)
    assert found.evicted == 0


def store(bench: Bench, keys: list[BlockKey], parent: BlockKey | None, groups: bytes) -> None:
    number = next(bench.numbers)
    bench.space.reserve(ME, number, parent, keys, group=groups)
    bench.space.commit(ME, number)


@settings(max_examples=scale_examples(40), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    capacity=st.integers(4, 60),
    policy=st.sampled_from(("lru", "gittins")),
    model=st.sampled_from(MODELS),
)
@example(seed=985, capacity=7, policy="lru", model=MODELS[2])
def test_the_managers_space_finds_the_same(
    seed: int, capacity: int, policy: str, model: tuple[Group, ...]
) -> None:
    trace, grouping = random_trace(seed), Grouping(model)
    layout = BlockLayout(block_tokens=trace.block_tokens, shard_bytes=4096, groups=model)
    bench = Bench(host_slots=capacity, disk=False, eviction=policy, layout=layout)
    tier = GroupedTier(capacity, make_policy(policy, capacity), grouping, trace.unique_blocks)
    try:
        for number, request in enumerate(trace.requests):
            bench.clock.advance(100.0 + request.arrived_s - bench.clock())
            now_s = bench.clock()
            keys = split_keys(b"".join(block.to_bytes(32, "little") for block in request.blocks))
            expected = tier.requested(request.blocks, now_s)
            looking = bench.space.looking_up(ME, number, keys, 0)
            while (found := advance(looking)) is None:
                pass
            bench.space.pump()
            boundary = found.lease.boundary if found.lease is not None else 0
            assert (found.full, boundary) == expected
            bench.space.release(ME, number)
            tier.insert(request, trace.block_tokens, expected, now_s)
            chain = grouping.keys(keys, grouping.chain(0, len(keys) - len(keys) % grouping.step))
            start = len(grouping.chain(0, boundary))
            store(bench, chain[start:], chain[start - 1] if start else None, bytes(len(chain) - start))
            for tail in tails(grouping, request, trace.block_tokens, expected):
                parents = grouping.parent(tail.boundary)
                before = grouping.keys(keys, parents)
                places = grouping.tail(tail.boundary, kinds=tail.kinds)
                parent = before[0] if before else None
                store(bench, grouping.keys(keys, places), parent, bytes(place.group for place in places))
            bench.space.host_pool.check()
    finally:
        bench.close()


def conversation(turns: int) -> Trace:
    """One chat that grows by two blocks a turn, and is never asked for again from earlier on."""
    builder = TraceBuilder("chat", 16)
    for turn in range(1, turns + 1):
        builder.add(float(turn), list(range(2 * turn)), 32 * turn, 1)
    return builder.build()


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_windows_of_earlier_turns_go_first(policy: str) -> None:
    """The chat's own blocks and its latest tails fit: what goes are the windows that lie behind."""
    groups, turns = (FULL, WINDOW, WINDOW), 30
    trace = conversation(turns)
    room = trace.unique_blocks + 4 * 4
    found = grouped_replay(trace, Grouping(groups), room, make_policy(policy, room))
    assert list(found.hits_by_request) == [2 * turn for turn in range(turns)]
    assert found.evicted > 0


def test_gittins_keeps_a_tail_as_long_as_the_prompt_before_it() -> None:
    """Chats that go on, and one-time prompts between them: a chat without its tail would be of no use."""
    builder, names = TraceBuilder("chats", 16), count()
    chats: list[list[int]] = [[] for _ in range(12)]
    at_s = 0.0
    for _ in range(25):
        for chat in chats:
            chat += [next(names) for _ in range(3)]
            builder.add(at_s, list(chat), 16 * len(chat), 20, 1.0)
            builder.add(at_s + 3.0, [next(names) for _ in range(6)], 96, 1, 1.0)
            at_s += 10.0
    trace, grouping, room = builder.build(), Grouping((FULL, WINDOW)), 700
    plain = make_policy("gittins", room)
    told = grouped_replay(trace, grouping, room, make_policy("gittins", room))
    untold = grouped_replay(trace, grouping, room, _Untold(plain))  # type: ignore[arg-type]  # it passes calls on
    assert told.hits > untold.hits


class _Untold:
    """A policy that does not know which blocks are tails."""

    def __init__(self, policy: object) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> object:
        if name == "inserted_tail":
            raise AttributeError(name)
        return getattr(self._policy, name)
