"""Mirrors of two tiers, read slowly and in any portions, against sets of what real slot pools hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm.block import BlockKey, BlockState, Tier
from kvbm.client.mirror import Mirror
from kvbm.hashing import split_keys
from kvbm.manager import announcements
from kvbm.manager.announcements import KeysAccount
from kvbm.manager.held_keys import HeldKeys
from kvbm.manager.pool import ABORTED, RESET, SlotPool
from kvbm.policy import LeafFirstLru
from kvbm.protocol import HeldBlocks
from rigs.found_blocks import recover
from rigs.property_tests import scale_examples

SLOTS = {Tier.HOST: 5, Tier.DISK: 7}
KEYS = [BlockKey(bytes([number]) * 32) for number in range(12)]
READERS_MAX = 3
DEEP = 6

tiers = st.sampled_from(list(SLOTS))
pick = st.integers(0, 1000)

Held = dict[Tier, set[BlockKey]]


class Reader:
    """One client: what was sent to it and not read yet, what it was told in all, and its mirror."""

    def __init__(self, space: Any) -> None:
        self.account = KeysAccount(space)
        self.told_all = False
        self.sent: deque[tuple[bytes, Held | None]] = deque()
        self.told: Held = {tier: set() for tier in SLOTS}
        self.mirror = Mirror()

    def send(self, keys_max: int, now: Held | None) -> None:
        """What the manager's turn sends; where that is all that there is, what was held then goes along."""
        if self.account.complete and self.told_all:
            return
        with patch.object(announcements, "KEYS_AT_ONCE", keys_max):
            message = self.account.next(self.told_all)
        assert message is not None or self.told_all or not self.account.complete, "the first end is told"
        if message is not None:
            assert message.complete == (self.account.complete and not self.told_all)
            for keys in (*message.removed.values(), *message.stored.values()):
                assert len(split_keys(keys)) <= keys_max
            held = None
            if now is not None and self.account.complete:
                held = {tier: set(keys) for tier, keys in now.items()}
            self.sent.append((msgspec.msgpack.encode(message), held))
        self.told_all = self.told_all or self.account.complete

    def read(self) -> None:
        """One message: no block comes twice, and none goes that had not come."""
        frame, then = self.sent.popleft()
        message = msgspec.msgpack.decode(frame, type=HeldBlocks)
        for number, keys in message.removed.items():
            for key in split_keys(keys):
                self.told[Tier(number)].remove(key)
        for number, keys in message.stored.items():
            for key in split_keys(keys):
                assert key not in self.told[Tier(number)]
                self.told[Tier(number)].add(key)
        self.mirror.take_in(message)
        assert self.mirror.complete or not message.complete
        if then is not None:
            assert self.told == then


class MirrorMachine(RuleBasedStateMachine):
    """Blocks come and go in two tiers; the lower one is indexed anew from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Held = {tier: set() for tier in SLOTS}
        self.filling: dict[Tier, dict[BlockKey, int]] = {tier: {} for tier in SLOTS}
        self.now_s = 1.0
        self.index = {tier: HeldKeys(tier, slots) for tier, slots in SLOTS.items()}
        self.pools = {tier: self.new_pool(tier) for tier in SLOTS}
        for tier, pool in self.pools.items():
            self.index[tier].pool = pool
        self.space: Any = SimpleNamespace(
            options=SimpleNamespace(staging=False),
            failure="",
            held=self.index[Tier.HOST],
            disk=SimpleNamespace(held=self.index[Tier.DISK]),
        )
        self.readers = [Reader(self.space)]

    def new_pool(self, tier: Tier) -> SlotPool[BlockKey]:
        index = self.index[tier]

        def emptied(slots: Sequence[int], keys: Sequence[BlockKey], reason: str) -> None:
            index.emptied(slots)
            if reason not in (ABORTED, RESET):
                self.held[tier] -= set(keys)

        pool: SlotPool[BlockKey] = SlotPool(tier, SLOTS[tier], LeafFirstLru(SLOTS[tier]), emptied)
        pool.on_committed = index.committed
        return pool

    @property
    def held_when_tidy(self) -> Held | None:
        """None while the ends of blocks that were cleared have yet to be told."""
        return None if any(pool.cleared_count for pool in self.pools.values()) else self.held

    def tick(self) -> float:
        self.now_s += 0.5
        return self.now_s

    # ---- blocks

    @rule(tier=tiers, first=pick, length=st.integers(1, 4), behind=st.booleans())
    def reserve(self, tier: Tier, first: int, length: int, behind: bool) -> None:
        """Blocks of a chain; others are evicted for them."""
        pool = self.pools[tier]
        start = first % len(KEYS)
        keys = [key for key in KEYS[start : start + length] if not pool.holds(key)]
        if keys:
            parent = KEYS[start - 1] if behind and start else None
            slots = pool.reserve_chain(keys, parent, self.tick())
            self.filling[tier].update(zip(keys, slots, strict=False))

    @precondition(lambda self: any(self.filling.values()))
    @rule(tier=tiers, which=pick, count=st.integers(1, 3), works=st.booleans())
    def copied(self, tier: Tier, which: int, count: int, works: bool) -> None:
        """Some copies end: their blocks can be found, or they failed."""
        filling = self.filling[tier]
        chosen = [key for i, key in enumerate(filling) if (i + which) % len(filling) < count]
        slots = [filling.pop(key) for key in chosen]
        if works:
            self.pools[tier].commit_all(slots)
            self.held[tier].update(chosen)
        else:
            self.pools[tier].abort_all(slots[::-1])

    @precondition(lambda self: any(self.held.values()))
    @rule(tier=tiers, which=pick)
    def evict(self, tier: Tier, which: int) -> None:
        resident = [slot for slot, _ in self.pools[tier].resident()]
        if resident:
            self.pools[tier].evict(resident[which % len(resident)])

    @rule(tier=tiers)
    def clear(self, tier: Tier) -> None:
        self.pools[tier].clear()
        self.held[tier].clear()

    @rule(tier=tiers)
    def forget_one_that_was_cleared(self, tier: Tier) -> None:
        next(self.pools[tier].tidying(1), None)

    @rule(tier=tiers, sent=st.integers(1, 4))
    def all_go_and_come_back(self, tier: Tier, sent: int) -> None:
        """While the readers that were told of them still have to be told that they went."""
        for reader in self.readers:
            reader.send(sent, self.held_when_tidy)
        keys = sorted(self.held[tier], reverse=True)
        self.pools[tier].clear()
        self.held[tier].clear()
        if keys:
            slots = self.pools[tier].reserve_chain(keys, None, self.tick())
            self.pools[tier].commit_all(slots)
            self.held[tier] = set(keys)

    @rule(kept=st.lists(st.sampled_from(KEYS), unique=True, max_size=SLOTS[Tier.DISK]), shift=pick)
    def index_anew(self, kept: list[BlockKey], shift: int) -> None:
        """The disk works again: what it still has lies in other slots, perhaps with blocks that nobody knew of."""
        tier, slots = Tier.DISK, SLOTS[Tier.DISK]
        pool = self.new_pool(tier)
        pool.on_committed = None
        recover(pool, [(key, None, (i + shift) % slots) for i, key in enumerate(kept)], self.tick())
        self.pools[tier], self.filling[tier], self.held[tier] = pool, {}, set(kept)
        self.index[tier].emptied(range(self.index[tier].slot_count))
        self.index[tier].indexed_anew(pool)
        pool.on_committed = self.index[tier].committed

    # ---- readers

    @precondition(lambda self: len(self.readers) < READERS_MAX)
    @rule()
    def one_more(self) -> None:
        self.readers.append(Reader(self.space))

    @precondition(lambda self: self.readers)
    @rule(which=pick)
    def one_goes(self, which: int) -> None:
        self.readers.pop(which % len(self.readers)).account.end()

    @precondition(lambda self: self.readers)
    @rule(which=pick, keys_max=st.integers(1, 4))
    def send(self, which: int, keys_max: int) -> None:
        reader = self.readers[which % len(self.readers)]
        if len(reader.sent) < DEEP:
            reader.send(keys_max, self.held_when_tidy)

    @precondition(lambda self: any(reader.sent for reader in self.readers))
    @rule(which=pick)
    def read(self, which: int) -> None:
        waiting = [reader for reader in self.readers if reader.sent]
        waiting[which % len(waiting)].read()

    # ---- laws

    @invariant()
    def the_mirror_says_what_it_was_told(self) -> None:
        for reader in self.readers:
            host, either = reader.told[Tier.HOST], reader.told[Tier.HOST] | reader.told[Tier.DISK]
            assert reader.mirror.each_in_host(KEYS) == [key in host for key in KEYS]
            for start in (0, 5):
                chain = KEYS[start:]
                assert reader.mirror.in_host(chain) == leading(chain, host)
                assert reader.mirror.held(chain) == leading(chain, either)

    @invariant()
    def the_model_is_right(self) -> None:
        for tier, pool in self.pools.items():
            pool.check()
            assert {key for _, key in pool.resident()} == self.held[tier]
            assert all(pool.state_of(slot) is BlockState.FILLING for slot in self.filling[tier].values())

    def teardown(self) -> None:
        """Once nothing changes, every reader comes to know all, and what it has to be told is bounded by the tiers."""
        for pool in self.pools.values():
            for _ in pool.tidying():
                pass
        for reader in self.readers:
            before, turns = len(reader.sent), 0
            while not (reader.account.complete and reader.told_all):
                reader.send(1, self.held_when_tidy)
                turns += 1
                assert turns <= 4 * max(SLOTS.values())
            removed = [msgspec.msgpack.decode(frame, type=HeldBlocks).removed for frame, _ in reader.sent]
            for tier, slots in SLOTS.items():
                told = [keys for each in removed[before:] for number, keys in each.items() if number == tier]
                assert sum(len(split_keys(keys)) for keys in told) <= slots
            while reader.sent:
                reader.read()
            assert reader.told == self.held
            assert reader.mirror.complete


def leading(chain: Sequence[BlockKey], held: set[BlockKey]) -> int:
    return next((i for i, key in enumerate(chain) if key not in held), len(chain))


TestMirrors = MirrorMachine.TestCase
TestMirrors.settings = settings(max_examples=scale_examples(100), stateful_step_count=40, deadline=None)
