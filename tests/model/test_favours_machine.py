"""Favoured blocks in a pool, against an oracle that looks at every slot each time.

Tenants ask, store, retain and come back after a while; slots are leased, stores fail and blocks are dropped, over every
built-in policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbm.block import BlockState, Tier
from kvbm.manager.pool import ABORTED, SlotPool
from kvbm.policy import make_policy
from kvbm.policy.registry import EVICTION
from kvbm.policy.shares import ACTIVE_S
from rigs.property_tests import scale_examples

SLOTS = 16
Key = bytes
"""A tenant and the path of a block, in 32 bytes."""

pick = st.integers(0, 1000)
tenants = st.sampled_from(["", "a", "b", "c"])
paths = st.lists(st.sampled_from("xy"), min_size=1, max_size=5).map(tuple)


def key_of(tenant: str, path: Sequence[str]) -> Key:
    return f"{tenant}/{''.join(path)}".ljust(32).encode()


def chain_of(tenant: str, path: tuple[str, ...]) -> list[Key]:
    return [key_of(tenant, path[: place + 1]) for place in range(len(path))]


def owner(key: Key) -> str:
    return key.decode().split("/")[0]


def before(key: Key) -> Key:
    """The block before it; of a chain's first a key that no block has."""
    tenant, path = key.decode().rstrip().split("/")
    return key_of(tenant, path[:-1])


class FavoursMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1.0
        self.asked_s: dict[str, float] = {}
        self.retained: dict[Key, tuple[float, int]] = {}
        self.leased: list[int] = []
        self.gone: list[tuple[Key, bool]] = []
        self.evicting = False

    @initialize(policy=st.sampled_from(list(EVICTION.built_in)), share=st.sampled_from([0.5, 1.0, 0.0]))
    def start(self, policy: str, share: float) -> None:
        inner = make_policy(policy, SLOTS)
        self.admits_all, self.share = policy != "gittins", share
        self.pool: SlotPool[Key] = SlotPool(Tier.HOST, SLOTS, inner, self.emptied, salt_share=share)

    # ---- the oracle

    def emptied(self, slots: Sequence[int], keys: Sequence[Key], reason: str) -> None:
        self.gone += [(key, reason != ABORTED) for key in keys]

    def held(self) -> Counter[str]:
        return Counter(owner(key) for key in self.pool._slots)

    def floor(self) -> int:
        active = [tenant for tenant, at_s in self.asked_s.items() if at_s + ACTIVE_S > self.now_s]
        return int(SLOTS * self.share) // len(active) if len(active) > 1 else 0

    def poor(self, tenant: str, held: Counter[str]) -> bool:
        """Whether the tenant may lose nothing to others."""
        active = tenant in self.asked_s and self.asked_s[tenant] + ACTIVE_S > self.now_s
        return active and held[tenant] <= self.floor()

    def priority(self, key: Key) -> int:
        until_s, priority = self.retained.get(key, (0.0, 0))
        return priority if until_s > self.now_s else -1

    def could_go(self, held: set[Key], parent: Key | None) -> list[Key]:
        """The blocks that an eviction may choose when these are the ones that are held."""
        parents = {before(key) for key in held}
        return [
            key
            for key in held - parents - {parent}
            if (slot := self.pool.find(key)) is not None and slot not in self.leased
        ]

    def may_lose(self, key: Key, newcomer: str | None, held: Counter[str]) -> bool:
        return newcomer is None or owner(key) == newcomer or not self.poor(owner(key), held)

    def check_victims(
        self, held_first: dict[Key, int], parent: Key | None, newcomer: str, needed: int, refusable: bool
    ) -> None:
        victims = [key for key, was_resident in self.gone if was_resident]
        held_before, held_after = (
            Counter(owner(key) for key in held_first),
            Counter(owner(key) for key in held_first),
        )
        for key in victims:
            held_after[owner(key)] -= 1
        floor = self.floor()
        for tenant in self.asked_s:
            if tenant != newcomer and self.asked_s[tenant] + ACTIVE_S > self.now_s:
                least = min(held_before[tenant], floor)
                assert held_after[tenant] >= least, f"{tenant!r} fell below its floor of {floor}: {victims}"
        self.gone = []
        left, held = set(held_first), held_before
        for key in victims:
            if self.priority(key) >= 0:
                others = [
                    o
                    for o in self._could_have_gone(left, parent, victims)
                    if self.may_lose(o, newcomer, held)
                ]
                assert all(self.priority(o) >= self.priority(key) for o in others), (
                    f"{key} went before {others}"
                )
                break
            left.discard(key)
            held[owner(key)] -= 1
        if len(victims) < needed and not refusable:
            spared = [
                o
                for o in self.could_go(set(self.pool._slots), parent)
                if self.may_lose(o, newcomer, held_after)
            ]
            assert not spared, f"{len(victims)} of {needed}, though {spared} may go"

    def _could_have_gone(self, left: set[Key], parent: Key | None, victims: list[Key]) -> list[Key]:
        """As `could_go`, of a moment in which those of the victims in `left` were here still."""
        parents = {before(key) for key in left}
        there = {key for key in left if key in victims or self.pool.find(key) is not None}
        leased = {self.pool.key_of(slot) for slot in self.leased}
        return sorted(there - parents - {parent} - leased)

    # ---- what happens

    @rule(seconds=st.sampled_from([0.5, 1.0, 30.0, ACTIVE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(tenant=tenants, path=paths)
    def request(self, tenant: str, path: tuple[str, ...]) -> None:
        self.pool.requested(chain_of(tenant, path), self.now_s, tenant=tenant)
        self.asked_s[tenant] = self.now_s

    @rule(tenant=tenants, path=paths, priority=st.integers(51, 53), ttl_s=st.sampled_from([5.0, 100.0]))
    def retain_what_may_come(self, tenant: str, path: tuple[str, ...], priority: int, ttl_s: float) -> None:
        self.retain(tenant, chain_of(tenant, path), priority, ttl_s)

    @precondition(lambda self: self.pool._slots)
    @rule(which=pick, priority=st.integers(51, 53), ttl_s=st.sampled_from([5.0, 100.0]))
    def retain_what_is_here(self, which: int, priority: int, ttl_s: float) -> None:
        keys = sorted(self.pool._slots)
        key = keys[which % len(keys)]
        self.retain(owner(key), [key], priority, ttl_s)

    def retain(self, tenant: str, keys: list[Key], priority: int, ttl_s: float) -> None:
        favouring = self.pool.favouring
        favouring.retain(keys, self.pool.slots_of(keys), tenant, self.now_s + ttl_s, priority, self.now_s)
        self.asked_s[tenant] = self.now_s
        favours = favouring.favours
        assert favours is not None
        assert len(favours.retained) <= favours.retained.budget
        self.retained = {each.key: (each.until_s, each.priority) for each in favours.retained.all()}  # type: ignore[misc]

    @rule(tenant=tenants, path=paths, insist=st.booleans(), commit=st.booleans())
    def store(self, tenant: str, path: tuple[str, ...], insist: bool, commit: bool) -> None:
        chain = chain_of(tenant, path)
        held = [self.pool.holds(key) for key in chain]
        first = held.index(False) if False in held else len(chain)
        run = chain[first:]
        run = run[: next((i for i, key in enumerate(run) if self.pool.holds(key)), len(run))]
        if not run:
            return
        if not self.asked_s.keys() >= {tenant}:
            self.request(tenant, path)  # nobody stores who has not asked
        there, needed = dict(self.pool._slots), len(run) - self.pool.free_count
        parent = chain[first - 1] if first else None
        self.gone = []
        slots = self.pool.reserve_chain(run, parent, self.now_s, insist, tenant=tenant)
        self.check_victims(there, parent, tenant, max(0, needed), not insist and not self.admits_all)
        if commit:
            self.pool.commit_all(slots)

    def _one(self, which: int, slots: Sequence[int]) -> list[int]:
        return [slots[which % len(slots)]] if slots else []

    def _in(self, state: BlockState) -> list[int]:
        return self.pool.slots_in(state)

    @rule(which=pick)
    def commit(self, which: int) -> None:
        self.pool.commit_all(self._one(which, self._in(BlockState.FILLING)))

    @rule(which=pick)
    def abort(self, which: int) -> None:
        self.pool.abort_all(self._one(which, self._in(BlockState.FILLING)))

    @rule(which=pick)
    def lease(self, which: int) -> None:
        slots = self._one(which, self._in(BlockState.RESIDENT))
        self.pool.lease_all(slots)
        self.leased += slots

    @precondition(lambda self: self.leased)
    @rule(which=pick)
    def unlease(self, which: int) -> None:
        self.pool.unlease(self.leased.pop(which % len(self.leased)))

    @rule(which=pick)
    def drop(self, which: int) -> None:
        free = [slot for slot in self._in(BlockState.RESIDENT) if slot not in self.leased]
        for slot in self._one(which, free):
            self.pool.evict(slot)

    @invariant()
    def every_slot_counts_once(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        favours = self.pool.favouring.favours
        if favours is not None and self.share:
            held = self.held()
            for number, name in enumerate(favours.shares._names):
                if name is not None:
                    assert favours.shares.held[number] == held[name]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.commit_all(self._in(BlockState.FILLING))
        while self.leased:
            self.pool.unlease(self.leased.pop())
        self.now_s += ACTIVE_S + 100.0  # no favour holds any more
        fresh = chain_of("d", tuple("z" * SLOTS))
        self.pool.reserve_chain(fresh, None, self.now_s, insist=True, tenant="d")
        assert set(self.pool._slots) == set(fresh), "a block is never given up"


TestFavours = FavoursMachine.TestCase
TestFavours.settings = settings(max_examples=scale_examples(120), stateful_step_count=40, deadline=None)
