"""Lookups in a namespace with several groups, against a search that tries every boundary token by token."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm.block import BlockKey
from kvbm.clock import ManualClock
from kvbm.grouping import Grouping, Place
from kvbm.groups import Group, GroupKind
from kvbm.hashing import chain_keys
from kvbm.layout import BlockLayout
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.leases import Lease
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll
from kvbm.tiers.host import HostArena
from rigs.fake_tier import FakeMedium, FakeTier
from rigs.property_tests import scale_examples

ME = 1
BLOCKS = 12
CHAINS = [
    chain_keys(bytes(32), [*range(20), *range(100 * fork, 100 * fork + 28)], 4)[:BLOCKS] for fork in (1, 2, 3)
]
"""Three prompts that begin with the same five blocks."""
GROUPS = {
    "windows": (Group(), Group(kind=GroupKind.WINDOW, reach=3)),
    "all kinds": (
        Group(),
        Group(span=2),
        Group(kind=GroupKind.WINDOW, reach=2),
        Group(kind=GroupKind.CHUNK, reach=4),
        Group(kind=GroupKind.STATE, span=2),
    ),
    "states alone": (Group(kind=GroupKind.STATE),),
}


def tokens_needed(group: Group, boundary: int) -> set[int]:
    """By the definition: the blocks of the layout whose tokens a group reads behind a boundary."""
    reach = group.reach * group.span
    if group.kind is GroupKind.FULL:
        return set(range(boundary))
    if group.kind is GroupKind.STATE:
        return {boundary - 1}
    return set(
        range(
            max(0, boundary - reach) if group.kind is GroupKind.WINDOW else boundary // reach * reach,
            boundary,
        )
    )


class GroupsMachine(RuleBasedStateMachine):
    groups: tuple[Group, ...] = GROUPS["windows"]
    disk_slots = 0
    host_slots = 20

    def __init__(self) -> None:
        super().__init__()
        layout = BlockLayout(block_tokens=4, shard_bytes=4096, groups=self.groups)
        self.grouping = Grouping(self.groups)
        self.clock, self.metrics = ManualClock(100.0), Metrics()
        self.arena = HostArena(layout, self.host_slots, touch_threads=0)
        self.tier = FakeTier(FakeMedium(layout, self.disk_slots), 4) if self.disk_slots else None
        self.space = Space(
            layout, self.arena, self.tier, AdmitAll(), self.metrics, self.clock, lambda lease: None,
            SpaceOptions(eviction="gittins"),
        )  # fmt: skip
        self.leases: dict[int, tuple[Lease, list[BlockKey]]] = {}
        self.group_of: dict[BlockKey, int] = {}
        self.numbers = 0

    def teardown(self) -> None:
        self.space.close(keep=False)

    def store(self, chain: list[BlockKey], parent: list[BlockKey], places: list[Place], failed: bool) -> None:
        self.numbers += 1
        keys = self.grouping.keys(chain, places)
        self.group_of.update(zip(keys, (place.group for place in places), strict=True))
        numbers = bytes(place.group for place in places)
        slots = self.space.reserve(
            ME, self.numbers, parent[-1] if parent else None, keys, group=numbers if any(numbers) else 0
        )
        taken = [slot for slot in slots if slot >= 0]
        if taken:
            self.space.commit(ME, self.numbers, range(len(taken)) if failed else ())

    @rule(
        chain=st.sampled_from(CHAINS),
        start=st.integers(0, BLOCKS),
        count=st.integers(1, BLOCKS),
        failed=st.booleans(),
    )
    def store_all_tokens(self, chain: list[BlockKey], start: int, count: int, failed: bool) -> None:
        self.clock.advance(1.0)
        before = self.grouping.keys(chain, self.grouping.chain(0, start))
        if places := self.grouping.chain(start, min(BLOCKS, start + count)):
            self.store(chain, before, places, failed and not start % 3)

    @rule(chain=st.sampled_from(CHAINS), steps=st.integers(1, BLOCKS))
    def store_a_tail(self, chain: list[BlockKey], steps: int) -> None:
        self.clock.advance(1.0)
        boundary = min(BLOCKS, steps * self.grouping.step)
        boundary -= boundary % self.grouping.step
        before = self.grouping.keys(chain, self.grouping.chain(0, boundary))
        if places := self.grouping.tail(boundary):
            self.store(chain, before, places, False)

    @rule(chain=st.sampled_from(CHAINS), skip=st.integers(0, BLOCKS - 1), limit=st.integers(1, BLOCKS))
    def look_up(self, chain: list[BlockKey], skip: int, limit: int) -> None:
        self.clock.advance(1.0)
        self.space.pump()
        skip -= skip % self.grouping.step
        limit = max(limit, skip)
        expected = self.by_trying(chain, limit)
        self.numbers += 1
        number = self.numbers
        lease = self.space.lookup(ME, number, chain[:limit], skip)
        if expected <= skip:
            assert lease is None
            return
        run = self.grouping.keys(chain, self.grouping.run(expected, skip))
        if lease is None:  # host memory had no room for all of it
            assert self.disk_slots
            assert len(run) > self.host_slots - sum(len(keys) for _, keys in self.leases.values())
            return
        assert lease.boundary == expected
        assert lease.prompt_blocks == expected - skip
        assert lease.keys == run
        self.leases[number] = lease, run

    def by_trying(self, chain: list[BlockKey], limit: int) -> int:
        for boundary in range(limit, 0, -1):
            if boundary % self.grouping.step:
                continue
            needed = {
                Place(number, block // group.span)
                for number, group in enumerate(self.groups)
                for block in tokens_needed(group, boundary)
            }
            keys = self.grouping.keys(chain, sorted(needed))
            if all(any(pool.find(key) is not None for pool in self.space.pools) for key in keys):
                return boundary
        return 0

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        self.space.release(ME, number)
        del self.leases[number]

    @precondition(lambda self: self.disk_slots)
    @rule(count=st.integers(1, 8))
    def disk_goes_on(self, count: int) -> None:
        assert self.tier is not None
        self.tier.release(count)
        self.space.pump()

    @invariant()
    def what_is_leased_is_there(self) -> None:
        for lease, run in self.leases.values():
            for key, slot, state in zip(lease.keys, lease.slots, lease.states, strict=False):
                if state == 1:
                    assert self.space.host_pool.find(key) == slot
            assert lease.keys == run[: len(lease.keys)]
        self.space.check()

    @invariant()
    def blocks_of_tails_are_known_as_such_in_every_tier(self) -> None:
        for pool in self.space.pools:
            for slot, key in pool.resident():
                kind = self.groups[self.group_of[key]].kind
                assert pool.is_tail(slot) == (kind is not GroupKind.FULL)


class AllKinds(GroupsMachine):
    groups = GROUPS["all kinds"]
    host_slots = 45


class OnDisk(GroupsMachine):
    disk_slots = 40


class StatesAlone(GroupsMachine):
    groups = GROUPS["states alone"]
    host_slots = 6


FEW = settings(
    max_examples=scale_examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestWindows = GroupsMachine.TestCase
TestAllKinds = AllKinds.TestCase
TestOnDisk = OnDisk.TestCase
TestStatesAlone = StatesAlone.TestCase
for case in (TestWindows, TestAllKinds, TestOnDisk, TestStatesAlone):
    case.settings = FEW
del case
