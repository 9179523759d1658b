"""What clients ask to be kept: the verdict of each range, what stays for it, and what goes when its time has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvbm.groups import Group, GroupKind
from kvbm.hashing import chain_keys
from kvbm.hints import NEUTRAL_PRIORITY, ClientHint, Outcome, Verdict, Why, read_hint
from kvbm.layout import BlockLayout
from kvbm.manager.deadlines import AGAIN_S, Deadlines
from kvbm.manager.hearing import word_of
from kvbm.manager.lookups import Found
from kvbm.manager.retaining import KEPT_S, final_verdicts
from kvbm.manager.server import TICK_S
from kvbm.protocol import Commit, LookupReply, Release, Reserve, ReserveReply, Reset, ResetReply
from kvbm.slices import at_once
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, Client, ManagerBench
from rigs.space import ME, Bench

OTHER = chain_keys(bytes([7] * 32), range(4000), 4)
ACCEPTED = ("retain", "accepted", "", "none")


def ask(leader: Client, number: int, keys: list[Any], *ranges: Any, **said: Any) -> LookupReply:
    """A lookup that is released at once."""
    reply = leader.lookup(number, keys, hint={"retain": list(ranges)} if ranges else {}, **said)
    leader.send(Release(lookup=number))
    leader.bench.step()
    leader.take()
    return reply


def store(
    leader: Client, number: int, keys: list[Any], parent: bytes = b"", tenant: str = ""
) -> Sequence[int]:
    leader.send(Reserve(store=number, parent=parent, keys=b"".join(keys), tenant=tenant))
    slots = leader.expect(ReserveReply).slots
    leader.send(Commit(store=number))
    return slots


def hints(manager: ManagerBench) -> dict[tuple[str, str], float]:
    """What was counted of ranges."""
    return {
        (outcome.value, why.value): value
        for outcome in Outcome
        for why in Why
        if (
            value := manager.metrics.value(
                "kvbm_hints_total", part="retain", outcome=outcome.value, reason=why.value
            )
        )
    }


@pytest.mark.parametrize("eviction", ["lru", "gittins"])
def test_what_is_retained_stays_while_others_may_go(
    make_manager: Callable[..., ManagerBench], eviction: str
) -> None:
    manager = make_manager(eviction=eviction)
    leader, _ = manager.engine()
    reply = ask(leader, 1, KEYS[:4], {"end": 16, "priority": 80, "min_ttl": 60})
    assert reply.verdicts == (ACCEPTED,)
    assert hints(manager) == {("accepted", "none"): 1}
    store(leader, 2, KEYS[:4])
    flood(manager, leader, range(6))
    assert len(ask(leader, 3, KEYS[:4]).slots) == 4
    assert manager.metrics.value("kvbm_evicted_retained_blocks_total", tier="host") == 0
    manager.tick(60.0)
    assert manager.metrics.value("kvbm_spared_blocks_total", tier="host", favour="retention") > 0
    flood(manager, leader, range(6, 18))
    assert manager.space().host_pool.find(KEYS[0]) is None, "its time is over"


@pytest.mark.parametrize("eviction", ["lru", "gittins"])
@pytest.mark.parametrize("others", [False, True])
def test_what_is_still_being_filled_is_retained_once_it_is_committed(
    make_manager: Callable[..., ManagerBench], eviction: str, others: bool
) -> None:
    manager = make_manager(eviction=eviction)
    leader, _ = manager.engine()
    if others:  # a pool in which blocks are favoured already
        ask(leader, 9, OTHER[400:401], {"min_ttl": 1})
    leader.send(Reserve(store=2, parent=b"", keys=b"".join(KEYS[:4])))
    leader.expect(ReserveReply)
    assert ask(leader, 1, KEYS[:4], {"end": 16, "priority": 80, "min_ttl": 60}).verdicts == (ACCEPTED,)
    leader.send(Commit(store=2))
    manager.step()
    assert manager.space().host_pool.favouring.retained_count == 4
    flood(manager, leader, range(6))
    assert len(ask(leader, 3, KEYS[:4]).slots) == 4


def test_a_store_that_fails_leaves_the_promise_for_the_next_one(
    make_manager: Callable[..., ManagerBench],
) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    leader.send(Reserve(store=2, parent=b"", keys=b"".join(KEYS[:2])))
    leader.expect(ReserveReply)
    ask(leader, 1, KEYS[:2], {"min_ttl": 60})
    leader.send(Commit(store=2, failed=(1,)))
    manager.step()
    assert manager.space().host_pool.favouring.retained_count == 1
    store(leader, 3, KEYS[1:2], KEYS[0])
    manager.step()
    assert manager.space().host_pool.favouring.retained_count == 2


def flood(manager: ManagerBench, leader: Client, numbers: range) -> None:
    """Prompts of others, each asked for often enough to be worth something to any policy."""
    for number in numbers:
        manager.clock.advance(5.0)
        part = OTHER[number * 12 : number * 12 + 12]
        for times in range(3):
            ask(leader, 100 + 10 * number + times, part)
        store(leader, 10 + number, part)


def test_a_quarter_of_the_tier_can_be_retained(make_manager: Callable[..., ManagerBench]) -> None:
    """The first blocks of a longer range; a higher priority takes the place of a lower one."""
    manager = make_manager()
    leader, _ = manager.engine()
    clipped = ("retain", "clipped", "4 of 8 blocks: the budget is used up", "budget")
    assert ask(leader, 1, KEYS[:8], {"min_ttl": 60}).verdicts == (clipped,)
    rejected = ("retain", "rejected", "the budget is used up", "budget")
    assert ask(leader, 2, OTHER[:2], {"min_ttl": 60}).verdicts == (rejected,)
    assert ask(leader, 3, OTHER[:2], {"min_ttl": 60, "priority": 60}).verdicts == (ACCEPTED,)
    favours = manager.space().host_pool.favouring.favours
    assert favours is not None
    assert {each.key for each in favours.retained.all()} == {*KEYS[:2], *OTHER[:2]}
    assert hints(manager) == {("clipped", "budget"): 1, ("rejected", "budget"): 1, ("accepted", "none"): 1}


def test_each_salt_has_an_equal_part_of_the_budget(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(host_blocks=32)
    leader, _ = manager.engine()
    assert ask(leader, 1, KEYS[:8], {"min_ttl": 60}, tenant="one").verdicts == (ACCEPTED,)
    assert ask(leader, 2, OTHER[:4], {"min_ttl": 60}, tenant="two").verdicts == (ACCEPTED,)
    assert ask(leader, 3, OTHER[4:5], {"min_ttl": 60}, tenant="two").verdicts[0][1] == "rejected"


def test_every_range_is_counted_once_by_what_became_of_it_last(
    make_manager: Callable[..., ManagerBench],
) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    ranges = [
        {"end": 8, "min_ttl": 60},
        {"end": "all"},
        {"start": 100, "min_ttl": 60},
        {"end": 4, "priority": 1000},
        {"end": 4, "priority": NEUTRAL_PRIORITY},
        {"priority": 10},
    ]
    outcomes = [verdict[1] for verdict in ask(leader, 1, KEYS[:4], *ranges).verdicts]
    assert outcomes == ["accepted", "rejected", "rejected", "clipped", "rejected", "accepted"]
    assert hints(manager) == {
        ("accepted", "none"): 2,
        ("rejected", "form"): 1,
        ("rejected", "nothing"): 2,
        ("clipped", "bound"): 1,
    }
    ask(leader, 2, KEYS[:4], *ranges, again=True)
    assert sum(hints(manager).values()) == 6


def test_a_priority_alone_retains_for_an_hour_at_most(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    ask(leader, 1, KEYS[:1], {"priority": 60})
    ask(leader, 2, OTHER[:1], {"priority": 60, "max_ttl": 9})
    favours = manager.space().host_pool.favouring.favours
    assert favours is not None
    assert [each.until_s - manager.clock() for each in favours.retained.all()] == [KEPT_S, 9.0]


def test_a_low_priority_for_the_whole_request_lets_it_go_first() -> None:
    def word(**each: Any) -> object:
        hint = read_hint({"retain": [each]}).hint
        return word_of(ClientHint("t", hint), tokens=16)

    assert (
        word(priority=10)
        == word(priority=10, end=16)
        == word_of(ClientHint("t", read_hint({"final": True}).hint))
    )
    assert word(priority=10, end=12) is word(priority=10, start=4) is word(priority=10, min_ttl=5) is None


def test_models_of_several_groups_retain_nothing(make: Callable[..., Bench]) -> None:
    layout = BlockLayout(
        block_tokens=4, shard_bytes=4096, groups=(Group(), Group(kind=GroupKind.WINDOW, reach=2))
    )
    bench = make(layout=layout)
    hint = read_hint({"retain": [{"min_ttl": 60}]}).hint
    looking = bench.space.looking_up(ME, 1, KEYS[:4], 0, ClientHint("", hint))
    found = Found()
    try:
        while True:
            next(looking)
    except StopIteration as end:
        found = end.value
    assert [(each.outcome, each.why) for each in found.judged] == [(Outcome.REJECTED, Why.NOTHING)]


def test_the_later_verdict_counts() -> None:
    read = (Verdict("session", Outcome.ACCEPTED), Verdict("retain", Outcome.REJECTED, "r", Why.FORM))
    taken, clipped = Verdict("retain", Outcome.ACCEPTED), Verdict("retain", Outcome.CLIPPED, "c", Why.BOUND)
    budget = Verdict("retain", Outcome.CLIPPED, "b", Why.BUDGET)
    assert final_verdicts((*read, taken, clipped), (budget, taken)) == (*read, budget, clipped)
    assert final_verdicts(read, ()) == read


# ---- max_ttl


def held(manager: ManagerBench, keys: list[Any]) -> list[int]:
    """How many of the blocks each tier has."""
    return [sum(pool.find(key) is not None for key in keys) for pool in manager.space().pools]


def test_after_max_ttl_blocks_leave_both_tiers(
    make_manager: Callable[..., ManagerBench], below: FakeTier
) -> None:
    manager = make_manager(disk_blocks=32, disk_offload_filter=False)
    leader, _ = manager.engine()
    assert ask(leader, 1, KEYS[:4], {"max_ttl": 30}).verdicts == (ACCEPTED,)
    store(leader, 2, KEYS[:4])
    store(leader, 3, KEYS[4:6], parent=KEYS[3])  # what it generated
    below.release()
    manager.step()
    assert held(manager, KEYS[:6]) == [6, 6]
    manager.tick(29.0)
    assert held(manager, KEYS[:6]) == [6, 6]
    manager.tick(2.0)
    assert held(manager, KEYS[:6]) == [0, 0]
    assert manager.metrics.value("kvbm_evicted_blocks_total", tier="disk", reason="expired") == 6


def test_what_another_request_asks_for_stays(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    ask(leader, 1, KEYS[:4], {"max_ttl": 30})
    store(leader, 2, KEYS[:4])
    ask(leader, 3, KEYS[:2])
    manager.tick(31.0)
    assert held(manager, KEYS[:4]) == [2]
    manager.tick(600.0)
    assert held(manager, KEYS[:4]) == [2]


def test_what_is_in_use_or_continued_goes_later(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:6])
    ask(leader, 2, KEYS[:6], {"end": 16, "max_ttl": 10})
    manager.tick(11.0)
    assert held(manager, KEYS[:6]) == [6], "what lies behind it may stay"
    manager.space().host_pool.evict(manager.space().host_pool.find(KEYS[5]))  # type: ignore[arg-type]
    manager.space().host_pool.evict(manager.space().host_pool.find(KEYS[4]))  # type: ignore[arg-type]
    lease = manager.space().lookup(-1, 1, KEYS[:2], 0)
    assert lease is not None
    manager.tick(AGAIN_S + TICK_S)
    assert held(manager, KEYS[:6]) == [2], "a leased block stays"
    manager.space().release(-1, 1)
    manager.tick(AGAIN_S + TICK_S)
    assert held(manager, KEYS[:6]) == [0]
    assert not manager.space().retaining.deadlines


def test_deadlines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.manager.deadlines.KEYS_MAX", 12)
    deadlines = Deadlines()
    assert deadlines.add(KEYS[:4], 0, 4, 10.0) == 4
    assert deadlines.add(OTHER[:4], 0, 4, 10.0) == 2, "the last ones: without them the others can go"
    assert deadlines.add(OTHER[10:14], 0, 4, 10.0) == 0
    deadlines.stored(KEYS[3], KEYS[4:6])
    assert len(deadlines) == 6
    assert deadlines.drop((), 20.0) == 0
    assert len(deadlines) == 0, "none of them is anywhere"


def test_a_tenant_leaves_room_for_the_deadlines_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.manager.deadlines.KEYS_MAX", 12)
    deadlines = Deadlines()
    assert deadlines.add(KEYS[:12], 0, 12, 10.0, "a") == 6
    assert deadlines.add(OTHER[:12], 0, 12, 10.0, "b") == 4
    deadlines.asked(KEYS[:12])
    at_once(deadlines.clearing())
    assert deadlines.add(OTHER[:12], 0, 12, 10.0, "c") == 6


def test_what_somebody_retains_outlives_the_deadline_of_another(
    make_manager: Callable[..., ManagerBench],
) -> None:
    manager = make_manager()
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:4])
    ask(leader, 2, KEYS[:4], {"min_ttl": 3600, "priority": 100})
    ask(leader, 3, KEYS[:4], {"max_ttl": 0, "priority": 35})
    manager.tick(2.0)
    assert held(manager, KEYS[:4]) == [4]
    manager.tick(3600.0)
    assert held(manager, KEYS[:4]) == [0], "the deadline is kept once the time is over"


def test_a_reset_gives_the_budget_back(make_manager: Callable[..., ManagerBench]) -> None:
    """Keys change with it: what was retained never comes back."""
    manager = make_manager()
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:4])
    assert ask(leader, 2, KEYS[:4], {"min_ttl": 3600}).verdicts == (ACCEPTED,)
    leader.send(Reset())
    leader.expect(ResetReply)
    store(leader, 3, OTHER[:4])
    assert ask(leader, 4, OTHER[:4], {"min_ttl": 3600}).verdicts == (ACCEPTED,)


def test_what_was_asked_for_since_takes_no_memory() -> None:
    """A conversation that renews its deadline with each turn leaves nothing behind of the turns before."""
    deadlines = Deadlines()
    for turn in range(5000):
        deadlines.asked(KEYS[:50])
        deadlines.add(KEYS, 0, 50, 1e6 + turn)
    assert len(deadlines) == 50
    assert len(deadlines._due) < 2500
    assert sum(len(batch.keys) for _, _, batch in deadlines._due) == 50
