"""Policies learn of a request after its answer, and of the same request the same, however late that is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest

from kvbm.block import NO_SLOT, Tier
from kvbm.grouping import Grouping
from kvbm.groups import Group, GroupKind
from kvbm.layout import BlockLayout
from kvbm.manager.host_side import SpaceOptions
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.contract import BlockHead
from rigs.fake_remote import FakeStore
from rigs.remote import RemoteBench
from rigs.space import KEYS, LAYOUT, ME


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("below", [Tier.DISK, Tier.REMOTE])
def test_what_was_read_for_a_request_is_no_hit_of_host_memory(below: Tier, late: bool) -> None:
    """A policy that compares its hits with another's would take the reads for its own."""
    bench = RemoteBench(FakeStore(LAYOUT), disk_slots=16 if below is Tier.DISK else 0)
    bench.shares(KEYS[:6])
    bench.space.clear("host")
    bench.compute(KEYS[:2])
    bench.settle()
    heard = list[list[int]]()
    policy = bench.space.host_pool.policy
    inner = policy.requested

    def requested(keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        heard.append(list(slots))
        inner(keys, slots, now_s)

    policy.requested = requested  # type: ignore[method-assign]
    lease = bench.space.lookup(ME, 1, KEYS[:8], 0)
    assert lease is not None
    assert bytes(lease.sources) == bytes((Tier.HOST,)) * 2 + bytes((below,)) * 4
    if late:
        bench.space.below.advance()
        while bench.remote.release() + (bench.disk.release() if bench.disk is not None else 0):
            bench.space.below.collect()
            bench.space.below.advance()
        assert lease.ready == 6, "all reads have ended, and the policy has not heard of the request"
    assert heard == []
    while bench.space.catch_up():
        pass
    assert heard == [[*lease.slots[:2], *[NO_SLOT] * 6]]
    bench.settle()
    assert (lease.ready, bench.right(lease)) == (6, True)
    # The next request finds them all.
    bench.space.lookup(ME, 2, KEYS[:8], 0)
    while bench.space.catch_up():
        pass
    assert heard[1][:6] == lease.slots
    bench.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("host_slots", [16, 5])
def test_what_was_read_for_several_groups_is_no_hit_either(host_slots: int, late: bool) -> None:
    """Nor what was read for a run that does not fit, and is given up as a whole."""
    groups = (Group(), Group(kind=GroupKind.WINDOW, reach=2))
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, groups=groups)
    grouping = Grouping(groups)
    # One read after another: some have begun when the next finds no room.
    options = SpaceOptions(brought_at_once=1)
    bench = RemoteBench(FakeStore(layout), host_slots, layout=layout, space_options=options)
    prompt = KEYS[:4]
    for places, tail in ((grouping.chain(0, 4), False), (grouping.tail(4), True)):
        keys = grouping.keys(prompt, places)
        for key, place in zip(keys, places, strict=True):
            head = BlockHead(key, None, b"", place.group)
            bench.store.put(head, [block_bytes(key, 0, layout.slot_bytes)], tail=tail)
        bench.remote.learn(keys)
    heard = list[list[int]]()
    policy = bench.space.host_pool.policy
    for name in ("requested", "requested_tail"):
        inner = getattr(policy, name)

        def requested(
            keys: Sequence[Hashable],
            slots: Sequence[int],
            now_s: float,
            inner: Callable[[Sequence[Hashable], Sequence[int], float], None] = inner,
        ) -> None:
            heard.append(list(slots))
            inner(keys, slots, now_s)

        setattr(policy, name, requested)
    lease = bench.space.lookup(ME, 1, prompt, 0)
    assert (lease is not None) == (host_slots == 16)
    if late:
        bench.space.below.advance()
        while bench.remote.release():
            bench.space.below.collect()
            bench.space.below.advance()
        assert bench.space.host_pool.holds(prompt[0]), "all reads have ended"
    assert heard == []
    while bench.space.catch_up():
        pass
    assert [len(slots) for slots in heard] == [4, 2]
    assert {slot for slots in heard for slot in slots} == {NO_SLOT}
    bench.settle()
    bench.close()
