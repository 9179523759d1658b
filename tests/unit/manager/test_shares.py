"""Tenants of one manager: who floods a tier evicts nobody else below what that one is sure of."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import pytest

from kvbm.admin_protocol import Describe, Description
from kvbm.block import NO_SLOT, BlockKey, Tier
from kvbm.cli.status import favour_lines
from kvbm.client.admin import _AdminChannel
from kvbm.hashing import chain_keys
from kvbm.manager.pool import SlotPool
from kvbm.policy import LeafFirstLru
from kvbm.policy.shares import ACTIVE_S, OTHERS, TENANTS_MAX, Shares
from kvbm.protocol import PROTOCOL_VERSION, Commit, Hello, Release, Reserve, ReserveReply, Welcome
from rigs.fake_tier import FakeTier
from rigs.found_blocks import recover
from rigs.manager import Client, ManagerBench
from rigs.space import Bench


def chain(tenant: int, number: int = 0, blocks: int = 4) -> list[BlockKey]:
    """A prompt of a tenant: no key of one is another's."""
    return chain_keys(bytes([tenant] * 32), range(number * 1000, number * 1000 + 4 * blocks), 4)


class Tenant:
    """Asks for and stores prompts under one salt."""

    def __init__(self, leader: Client, number: int, salt: str) -> None:
        self.leader, self.number, self.salt = leader, number, salt

    def ask(self, prompt: int, times: int = 1) -> int:
        """How many blocks of the prompt are found."""
        found = 0
        for _ in range(times):
            lookup = next(NUMBERS)
            found = len(self.leader.lookup(lookup, chain(self.number, prompt), tenant=self.salt).slots)
            self.leader.send(Release(lookup=lookup))
            self.leader.take()
        return found

    def store(self, prompt: int) -> Sequence[int]:
        number = next(NUMBERS)
        keys = b"".join(chain(self.number, prompt))
        self.leader.send(Reserve(store=number, parent=b"", keys=keys, tenant=self.salt))
        slots = self.leader.expect(ReserveReply).slots
        self.leader.send(Commit(store=number))
        self.leader.take()
        return slots


NUMBERS = iter(range(1, 1 << 20))


def flood(manager: ManagerBench, tenant: Tenant, prompts: int = 30) -> None:
    """Many prompts, each asked for often enough to be worth something to any policy."""
    for prompt in range(100, 100 + prompts):
        manager.clock.advance(1.0)
        tenant.ask(prompt, times=2)
        tenant.store(prompt)


@pytest.mark.parametrize("eviction", ["lru", "gittins"])
@pytest.mark.parametrize(("share", "found"), [(1.0, 4), (0.5, 4), (0.0, 0)])
def test_who_floods_evicts_nobody_below_their_share(
    make_manager: Callable[..., ManagerBench], eviction: str, share: float, found: int
) -> None:
    manager = make_manager(eviction=eviction, salt_share=share)
    leader, _ = manager.engine()
    quiet, loud = Tenant(leader, 1, "quiet"), Tenant(leader, 2, "loud")
    quiet.ask(0)
    quiet.store(0)
    flood(manager, loud)
    assert held(manager.space().host_pool, 1) == found
    assert quiet.ask(0) == found
    assert loud.ask(129) == 4, "who floods has the rest"
    manager.tick()
    spared = manager.metrics.value("kvbm_spared_blocks_total", tier="host", favour="share")
    assert (spared > 0) == (share > 0)


def held(pool: SlotPool[BlockKey], tenant: int, prompt: int = 0) -> int:
    return sum(pool.find(key) is not None for key in chain(tenant, prompt))


def test_requests_without_a_salt_are_one_tenant(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(eviction="lru")
    leader, _ = manager.engine()
    quiet, loud = Tenant(leader, 1, ""), Tenant(leader, 2, "loud")
    quiet.ask(0)
    quiet.store(0)
    flood(manager, loud)
    assert quiet.ask(0) == 4


def test_who_asks_for_nothing_is_sure_of_nothing(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(eviction="lru")
    leader, _ = manager.engine()
    quiet, loud = Tenant(leader, 1, "quiet"), Tenant(leader, 2, "loud")
    quiet.ask(0)
    quiet.store(0)
    loud.ask(0)
    manager.clock.advance(ACTIVE_S)
    flood(manager, loud)
    assert quiet.ask(0) == 0


def test_one_salt_alone_changes_nothing(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(eviction="lru")
    leader, _ = manager.engine()
    flood(manager, Tenant(leader, 1, "only"))
    pool = manager.space().host_pool
    assert pool.favouring.favours is None
    assert type(pool.policy).__name__ == "LeafFirstLru"


def test_the_disk_is_shared_too(make_manager: Callable[..., ManagerBench], below: FakeTier) -> None:
    """Its blocks are labelled with those that they are copies of."""
    manager = make_manager(eviction="lru", disk_blocks=40, disk_offload_filter=False)
    leader, _ = manager.engine()
    quiet, loud = Tenant(leader, 1, "quiet"), Tenant(leader, 2, "loud")
    quiet.ask(0)
    quiet.store(0)
    quiet.ask(1)
    quiet.store(1)
    for prompt in range(100, 130):
        manager.clock.advance(1.0)
        loud.ask(prompt)
        loud.store(prompt)
        while below.release():
            manager.step()
    disk = manager.space().disk
    assert disk is not None
    assert [held(disk.pool, 1, prompt) for prompt in (0, 1)] == [4, 4]
    labels = {disk.pool.favouring.tenant_of(slot) for slot, _ in disk.pool.resident()}
    assert labels == {"quiet", "loud"}


def test_stores_without_a_name_belong_to_whom_they_continue(make: Callable[..., Bench]) -> None:
    """Programs that use the library need not name a salt where they store."""
    bench = make(host_slots=32)
    keys = chain(1, blocks=8)
    bench.store(chain(2), tenant="other")
    bench.store(keys[:4], tenant="one")
    bench.store(keys[4:], keys[3])
    pool = bench.space.host_pool
    assert {pool.favouring.tenant_of(pool.find(key) or 0) for key in keys} == {"one"}


def test_after_a_restart_blocks_belong_to_who_asks_for_them() -> None:
    pool: SlotPool[BlockKey] = SlotPool(Tier.DISK, 16, LeafFirstLru(16), salt_share=0.5)
    keys = chain(1)
    recover(pool, [(key, keys[slot - 1] if slot else None, slot) for slot, key in enumerate(keys)], 0.0)
    assert pool.favouring.tenant_of(0) is None
    pool.requested(keys[:2], 1.0, tenant="one")
    assert [pool.favouring.tenant_of(slot) for slot in range(4)] == ["one", "one", None, None]
    pool.check()


def test_a_pool_that_is_indexed_anew_keeps_who_was_active_and_what_is_retained() -> None:
    """A disk that works again: its blocks are found anew, in a pool of their own."""
    keys, others = chain(1), chain(2)
    before: SlotPool[BlockKey] = SlotPool(Tier.DISK, 16, LeafFirstLru(16), salt_share=0.5)
    before.requested(keys, 1.0, tenant="one")
    before.favouring.retain(
        [keys[0], others[0]], [NO_SLOT, NO_SLOT], "two", until_s=50.0, priority=1, now_s=2.0
    )
    after: SlotPool[BlockKey] = SlotPool(Tier.DISK, 16, LeafFirstLru(16), salt_share=0.5)
    recover(after, [(keys[0], None, 0)], 3.0)
    assert len(list(after.favouring.taking_over(before.favouring, 3.0, at_once=1))) == 2
    assert after.favouring.favours is not None
    assert after.favouring.retains(0, 49.0)
    assert not after.favouring.retains(0, 51.0)
    assert {each.key for each in after.favouring.favours.retained.all()} == {keys[0], others[0]}
    assert {name for name, _ in after.favouring.favours.shares.active()} == {"one", "two"}
    after.check()


def test_operators_status_says_how_many_salts_there_are(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(eviction="lru")
    leader, _ = manager.engine()
    for number, salt in enumerate(("one", "two", ""), 1):
        tenant = Tenant(leader, number, salt)
        tenant.ask(0)
    Tenant(leader, 1, "one").store(0)
    admin = Client(manager, _AdminChannel.connect(manager.path))
    try:
        admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
        admin.expect(Welcome)
        admin.send(Describe())
        description: Any = admin.expect(Description)
    finally:
        admin.close()
        manager.step()
    (line,) = favour_lines(description.spaces)
    assert line.endswith(": 3 active cache salts, 2 of them below their sure share")


def test_tenants_are_bounded() -> None:
    """Beyond so many they are one; numbers of those that hold nothing any more serve again."""
    shares = Shares(64, 0.5)
    for number in range(TENANTS_MAX):
        shares.asks(shares.number(f"t{number}"), 1.0)
    assert shares.number("t0") != OTHERS
    assert shares.number("late") == shares.number("later") == OTHERS
    shares.take([5], shares.number("t0"))
    shares.asks(shares.number("t1"), 1.0 + ACTIVE_S)
    fresh = shares.number("late")
    assert fresh not in (OTHERS, shares.number("t0"), shares.number("t1"))
    assert shares.name(fresh) == "late"


class Counting(LeafFirstLru):
    """A policy that counts its answers, and the newcomers that it had to look at for them."""

    answers = looked_at = 0

    def victims(
        self, needed: int, incoming: Sequence[Any], leased: Container[int], now_s: float
    ) -> list[int]:
        self.answers += 1
        self.looked_at += len(incoming)
        return super().victims(needed, incoming, leased, now_s)


@pytest.mark.parametrize("poor", [False, True])
def test_room_among_many_tenants_is_made_in_few_answers(poor: bool) -> None:
    """A few blocks an answer, because some tenant has no more to spare, would look at all newcomers for each few."""
    slots, tenants = 2000, 50
    policy = Counting(slots)
    pool: SlotPool[BlockKey] = SlotPool(Tier.HOST, slots, policy, salt_share=0.5)
    floor = slots // 2 // tenants
    for tenant in range(tenants):
        pool.requested(chain(tenant)[:1], 1.0, tenant=str(tenant))
    for tenant in range(tenants):
        blocks = floor + 1 if poor and tenant else pool.free_count // (tenants - tenant)
        pool.commit_all(pool.reserve_chain(chain(tenant, 1, blocks), None, 2.0, tenant=str(tenant)))
    pool.commit_all(pool.reserve_chain(chain(99, 2, pool.free_count), None, 3.0, tenant="0"))
    pool.requested(chain(0)[:1], 4.0, tenant="0")
    wanted = 400
    assert len(pool.reserve_chain(chain(98, 3, wanted), None, 5.0, tenant="0")) == wanted
    assert policy.answers <= 4
    assert policy.looked_at <= 4 * wanted
    favours = pool.favouring.favours
    assert favours is not None
    assert all(favours.shares.held[favours.shares.number(str(tenant))] >= floor for tenant in range(tenants))
    pool.check()


def test_slots_that_are_given_are_integers_of_python() -> None:
    """Policies ask sets and bounds for them, where numpy's would be slow, and refused."""
    shares = Shares(64, 0.5)
    first, second = shares.number("a"), shares.number("b")
    shares.take([3, 4], first)
    assert shares.give([NO_SLOT, 3, 4], second) == [(first, [3, 4])]
    assert all(type(slot) is int for _, slots in shares.give([3, 4], first) for slot in slots)
    assert (shares.held[first], shares.held[second]) == (2, 0)
