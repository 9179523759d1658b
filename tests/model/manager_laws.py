"""What holds of a space after every step of the manager's state machine."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvbm.block import NO_SLOT, BlockKey, BlockState
from kvbm.manager.leases import PREFETCHES, LeaseState
from kvbm.manager.lookups import LookingUp
from kvbm.manager.space import Space
from kvbm.manager.table_sizes import space_tables
from kvbm.testing.oracle import BlockOracle
from kvbm.tiers.host import HostArena


class ManagerLaws(RuleBasedStateMachine):
    """The laws. A subclass opens the space, and keeps what it was promised: the generations of each lease's slots."""

    space: Space
    arena: HostArena
    oracle: BlockOracle
    calm_steps: int
    promised: dict[tuple[int, int], tuple[int, ...]]
    looking: dict[tuple[int, int], LookingUp]
    holders: dict[int, tuple[BlockKey | None, int]]

    @invariant()
    def the_law_holds(self) -> None:
        if not hasattr(self, "space"):
            return
        self.calm_steps += 1
        self.space.check()
        rising = self.space.disk.onboarder.queued_count if self.space.disk else 0
        assert all(each.count <= each.most for each in space_tables(self.space)), (
            "a table is beyond its bound"
        )
        reserved = sum(len(r.slots) for r in self.space.reservations)
        assert self.space.host_pool.counts().filling == rising + reserved, "a filling slot that nobody fills"
        if self.space.disk is not None:
            assert self.space.disk.pool.counts().filling <= 4
            assert self.space.disk.pool.counts().leased <= rising

    @invariant()
    def what_can_be_found_is_right(self) -> None:
        if not hasattr(self, "space"):
            return
        for slot, key in self.space.host_pool.resident():
            content = b"".join(bytes(view) for view in self.arena.slot_views(slot))
            self.oracle.check(key, content)

    @invariant()
    def a_slot_that_changes_hands_has_another_generation(self) -> None:
        """A worker that reads it without a lease has nothing else to notice it by."""
        if not hasattr(self, "space") or self.space.host_pool.cleared_count:
            return  # slots of cleared blocks rise before they are filled
        for slot in range(self.space.host_pool.slot_count):
            key = None
            if self.space.host_pool.state_of(slot) is not BlockState.FREE:
                key = self.space.host_pool.key_of(slot)
            before = self.holders.get(slot)
            if before is not None and before[0] is not None and before[0] != key:
                assert self.arena.generation(slot) > before[1]
            self.holders[slot] = (key, self.arena.generation(slot))

    @invariant()
    def leases_are_intact(self) -> None:
        if not hasattr(self, "space"):
            return
        held = 0
        for lease in self.space.leases:
            name = lease.owner, lease.number
            # A lookup that is not through has told nobody of its slots.
            generations = self.promised.get(name)
            assert (generations is None) == (name in self.looking or lease.owner == PREFETCHES)
            assert lease.ready <= len(lease.slots) == len(lease.keys) <= len(lease.states)
            for i, slot in enumerate(lease.slots):
                assert generations is None or self.arena.generation(slot) == generations[i], (
                    "a leased slot changed hands"
                )
                assert lease.states[i] != LeaseState.DROPPED
                if lease.states[i] == LeaseState.PINNED:
                    held += 1
                    assert self.space.host_pool.is_leased(slot)
                    assert self.space.host_pool.find(lease.keys[i]) == slot
                else:
                    assert i >= lease.ready
                    assert slot == NO_SLOT or self.space.host_pool.find_filling(lease.keys[i]) == slot
                    assert slot != NO_SLOT or name in self.looking
        if not held and not self.space.busy:
            assert self.space.host_pool.counts().leased == 0, "a pin that no lease holds"
