"""`LeafFirstLru` against a model that looks at every slot, every time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm.policy import LeafFirstLru
from rigs.property_tests import scale_examples

SLOTS = 8
pick = st.integers(0, 1000)


@dataclass
class Block:
    """One block as the model knows it. `serial` names this life of the slot."""

    serial: int
    parent: int
    used_s: float
    resident: bool = False
    leases: int = 0
    children: set[int] = field(default_factory=set)


class LruMachine(RuleBasedStateMachine):
    """Blocks are filled, leased, used and removed; the victim must be the oldest unleased leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LeafFirstLru(SLOTS)
        self.blocks: dict[int, Block] = {}
        self.now_s = 1.0

    def leased(self) -> set[int]:
        return {slot for slot, block in self.blocks.items() if block.leases}

    @rule(seconds=st.sampled_from([0.5, 1.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: len(self.blocks) < SLOTS)
    @rule(which=pick, root=st.booleans(), length=st.integers(1, 3))
    def insert(self, which: int, root: bool, length: int) -> None:
        """A chain of up to three blocks behind any other, or behind none."""
        self.now_s += 0.25  # one chain a moment: no ties between leaves
        free = [slot for slot in range(SLOTS) if slot not in self.blocks][:length]
        slots = sorted(self.blocks)
        parent = -1 if root or not slots else slots[which % len(slots)]
        self.policy.inserted(free, free, parent, self.now_s)
        for slot in free:
            self.blocks[slot] = Block(which, parent, self.now_s)
            if parent >= 0:
                self.blocks[parent].children.add(slot)
            parent = slot

    def _choose(self, which: int, wanted: set[int]) -> int:
        return sorted(wanted)[which % len(wanted)]

    @precondition(lambda self: any(not b.resident for b in self.blocks.values()))
    @rule(which=pick)
    def commit(self, which: int) -> None:
        slot = self._choose(which, {s for s, b in self.blocks.items() if not b.resident})
        self.blocks[slot].resident = True
        self.policy.evictable((slot,))

    @precondition(lambda self: any(b.resident for b in self.blocks.values()))
    @rule(which=pick)
    def lease(self, which: int) -> None:
        self.blocks[self._choose(which, {s for s, b in self.blocks.items() if b.resident})].leases += 1

    @precondition(lambda self: self.leased())
    @rule(which=pick)
    def unlease(self, which: int) -> None:
        slot = self._choose(which, self.leased())
        self.blocks[slot].leases -= 1
        if not self.blocks[slot].leases:
            self.policy.evictable((slot,))

    @precondition(lambda self: self.blocks)
    @rule(which=pick)
    def use_a_prefix(self, which: int) -> None:
        self.now_s += 0.25
        slot = self._choose(which, set(self.blocks))
        chain = [slot]
        while self.blocks[chain[-1]].parent >= 0:
            chain.append(self.blocks[chain[-1]].parent)
        self.policy.requested(chain[::-1], chain[::-1], self.now_s)
        for used in chain:
            self.blocks[used].used_s = self.now_s

    def _forget(self, slot: int) -> None:
        block = self.blocks.pop(slot)
        if block.parent >= 0:
            self.blocks[block.parent].children.discard(slot)
        for child in block.children:
            self.blocks[child].parent = -1

    @precondition(lambda self: any(not b.leases for b in self.blocks.values()))
    @rule(which=pick)
    def remove_any(self, which: int) -> None:
        """A store failed, or a block was corrupt: it goes before its continuations do."""
        slot = self._choose(which, {s for s, b in self.blocks.items() if not b.leases})
        self._forget(slot)
        self.policy.removed((slot,))

    @rule(needed=st.integers(1, SLOTS))
    def evict(self, needed: int) -> None:
        victims = self.policy.victims(needed, (), self.leased(), self.now_s)
        for victim in victims:
            assert victim == self._expected()
            self._forget(victim)
        assert len(victims) == needed or self._expected() == -1

    def _expected(self) -> int:
        leaves = [
            (block.used_s, slot)
            for slot, block in self.blocks.items()
            if block.resident and not block.leases and not block.children
        ]
        oldest = min(leaves, default=(0.0, -1))
        assert sum(used_s == oldest[0] for used_s, _ in leaves) <= 1 or oldest[1] >= 0
        return oldest[1]

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert len(self.policy._leaves) <= SLOTS

    def teardown(self) -> None:
        for block in self.blocks.values():
            block.leases = 0
        for slot in self.blocks:
            self.blocks[slot].resident = True
        self.policy.evictable(sorted(self.blocks))
        self.evict(SLOTS)
        assert not self.blocks


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=scale_examples(150), stateful_step_count=50, deadline=None)
