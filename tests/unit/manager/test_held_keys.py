"""The keys of what the tiers hold, told to leaders that keep a mirror of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.block import BlockKey, Tier
from kvbm.client.mirror import Mirror
from kvbm.hashing import join_keys, split_keys
from kvbm.manager import announcements
from kvbm.manager.session import Session
from kvbm.protocol import (
    Announce,
    FromManager,
    HeldBlocks,
    Lookup,
    LookupReply,
    Release,
    Reset,
    ResetReply,
    TierEvents,
)
from rigs.announcing import answer, store
from rigs.manager import KEYS, OTHER, Client, ManagerBench

HOST, DISK = int(Tier.HOST), int(Tier.DISK)


class Told:
    """A leader that asked, and what it was told: block by block once, and in a mirror."""

    def __init__(self, leader: Client) -> None:
        self.leader = leader
        self.mirror = Mirror()
        self.held: dict[int, set[BlockKey]] = {HOST: set(), DISK: set()}
        self.complete = 0
        self.others: list[FromManager] = []
        leader.send(Announce(keys=True))

    def hear(self) -> list[list[BlockKey]]:
        """Take in what has come; what host memory and disk hold, sorted."""
        for _ in range(8):
            for message in self.leader.take():
                if isinstance(message, HeldBlocks):
                    self._take_in(message)
                else:
                    self.others.append(message)
        assert self.mirror.each_in_host(KEYS) == [key in self.held[HOST] for key in KEYS]
        return [sorted(keys) for keys in self.held.values()]

    def _take_in(self, message: HeldBlocks) -> None:
        for keys in (*message.removed.values(), *message.stored.values()):
            assert len(split_keys(keys)) <= announcements.KEYS_AT_ONCE
        for tier, keys in message.removed.items():
            assert self.held[tier].issuperset(split_keys(keys))
            self.held[tier].difference_update(split_keys(keys))
        for tier, keys in message.stored.items():
            assert self.held[tier].isdisjoint(split_keys(keys))
            self.held[tier].update(split_keys(keys))
        self.mirror.take_in(message)
        self.complete += message.complete


def truth(manager: ManagerBench) -> list[list[BlockKey]]:
    """What the pools hold: host memory, disk."""
    found = [sorted(key for _, key in pool.resident()) for pool in manager.space().pools]
    return found + [[]] * (2 - len(found))


def test_what_is_held_is_told_and_then_what_comes_and_goes(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:4], said=False)
    told = Told(leader)
    assert told.hear() == [sorted(KEYS[:4]), []]
    assert told.mirror.complete
    leader.reserve(2, KEYS[50:53])
    assert told.hear() == [sorted(KEYS[:4]), []], "nobody can find those yet"
    store(leader, 3, KEYS[4:6], KEYS[3])
    assert told.mirror.in_host(KEYS[:8]) == 4, "it is a moment late"
    assert told.hear() == [sorted(KEYS[:6]), []]
    assert (told.mirror.in_host(KEYS[:8]), told.mirror.held(KEYS[1:8]), told.mirror.held(KEYS[7:])) == (
        6,
        5,
        0,
    )
    store(leader, 4, KEYS[100:112])
    assert told.hear() == truth(manager)
    assert manager.space().host_pool.evicted_count
    leader.send(Reset())
    answer(leader, ResetReply)
    assert told.hear() == [[], []]
    assert told.mirror.in_host(KEYS[:1]) == 0
    assert told.complete == 1


def test_an_empty_cache_is_known_to_be_empty(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    told = Told(leader)
    assert told.hear() == [[], []]
    assert told.mirror.complete
    assert told.complete == 1


def test_events_and_keys_on_one_session_have_accounts_of_their_own(manager: ManagerBench) -> None:
    """What no engine spoke of is in no event; asked for again, one begins anew and the other goes on."""
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:3])
    store(leader, 2, KEYS[10:12], said=False)
    told = Told(leader)
    leader.send(Announce())

    def events() -> list[TierEvents]:
        told.hear()
        found, told.others = [each for each in told.others if isinstance(each, TierEvents)], []
        return found

    (first,) = events()
    assert [each.hashes for each in first.stored] == [join_keys(KEYS[:3])]
    assert first.complete
    assert told.hear() == [sorted(KEYS[:3] + KEYS[10:12]), []]
    leader.send(Announce())
    (again,) = events()
    assert again == first
    assert told.complete == 1, "the keys were told once"
    second = Told(leader)
    store(leader, 3, KEYS[3:5], KEYS[2])
    assert second.hear() == [sorted(KEYS[:5] + KEYS[10:12]), []]
    assert second.complete == 1
    (later,) = [each for each in second.others if isinstance(each, TierEvents)]
    assert [each.hashes for each in later.stored] == [join_keys(KEYS[3:5])]
    assert not later.complete


def test_two_leaders_have_accounts_of_their_own_and_one_that_goes_ends_only_its_own(
    make_manager: Callable[..., ManagerBench],
) -> None:
    manager = make_manager(2, host_blocks=32)
    one, _ = manager.engine("one")
    two, _ = manager.engine("two")
    other, _ = manager.engine("other", namespace=OTHER)
    told = [Told(each) for each in (one, two, other)]
    store(one, 1, KEYS[:3])
    assert [each.hear()[0] for each in told] == [sorted(KEYS[:3])] * 2 + [[]], (
        "another model's are not told of"
    )
    one.close()
    manager.step()
    store(two, 1, KEYS[3:5], KEYS[2])
    assert told[1].hear()[0] == sorted(KEYS[:5])


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_few_at_a_time_tell_everything_once(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(announcements, "KEYS_AT_ONCE", at_once)
    leader, _ = manager.engine()
    store(leader, 1, KEYS[:10])
    told = Told(leader)
    store(leader, 2, KEYS[100:110])
    for _ in range(8):
        told.hear()
    assert told.hear() == truth(manager)
    assert told.complete == 1


def test_a_leader_that_does_not_read_costs_one_message(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its socket takes no more, what it misses waits as marks of slots."""
    waiting: list[int] = []
    send = Session.send

    def noting(session: Session, message: object, fds: object = ()) -> None:
        if isinstance(message, HeldBlocks):
            waiting.append(session.wants_to_write)
        send(session, message, fds)  # type: ignore[arg-type]  # as it was called

    reader, _ = manager.engine("reader")
    writer, _ = manager.engine("writer")
    for session in manager.server.sessions.values():
        if session.hello is not None and (session.hello.engine, session.hello.role) == ("reader", "leader"):
            session.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            slow = session
    told = Told(reader)
    monkeypatch.setattr(Session, "send", noting)
    number = 0
    while not slow.wants_to_write:
        number += 1
        store(writer, number, KEYS[100 * (number % 20) : 100 * (number % 20) + 16], said=False)
        assert number < 500, "the socket never filled"
    sent = len(waiting)
    for _ in range(20):
        number += 1
        store(writer, number, KEYS[100 * (number % 20) : 100 * (number % 20) + 16], said=False)
    assert len(waiting) == sent, "nothing more was sent"
    assert not any(waiting)
    manager.until(lambda: told.hear() == truth(manager))
    assert not slow.closed


def on_disk(make_manager: Callable[..., ManagerBench], tmp_path: Path) -> tuple[ManagerBench, Client]:
    manager = make_manager(
        host_blocks=16, disk_blocks=20, disk_dir=str(tmp_path / "disk"), disk_offload_filter=False
    )
    return manager, manager.engine()[0]


def test_disk_is_told_of_apart_and_again_after_a_restart(
    make_manager: Callable[..., ManagerBench], tmp_path: Path
) -> None:
    manager, leader = on_disk(make_manager, tmp_path)
    told = Told(leader)
    store(leader, 1, KEYS[:8])
    manager.until(lambda: told.hear() == [sorted(KEYS[:8])] * 2)
    leader.send(Reset(tier="host"))
    answer(leader, ResetReply)
    assert told.hear() == [[], sorted(KEYS[:8])]
    assert (told.mirror.in_host(KEYS[:9]), told.mirror.held(KEYS[:9])) == (0, 8)
    manager.server.close(keep=True)
    manager.open = False
    manager, leader = on_disk(make_manager, tmp_path)
    told = Told(leader)
    assert told.hear() == [[], sorted(KEYS[:8])]
    assert told.complete == 1
    leader.send(Lookup(lookup=1, keys=join_keys(KEYS[:4])))
    answer(leader, LookupReply)
    manager.until(lambda: told.hear() == [sorted(KEYS[:4]), sorted(KEYS[:8])])
    assert told.mirror.in_host(KEYS[:9]) == 4
    leader.send(Release(lookup=1))
    for number in range(2, 8):
        store(leader, number, KEYS[100 * number : 100 * number + 8])
    manager.until(lambda: not manager.space().disk.queued_count)  # type: ignore[union-attr]  # there is one
    assert all(pool.evicted_count for pool in manager.space().pools)
    manager.until(lambda: told.hear() == truth(manager))
    leader.send(Reset())
    answer(leader, ResetReply)
    manager.until(lambda: told.hear() == [[], []])


def test_a_staging_area_holds_nothing_that_is_told_of(
    make_manager: Callable[..., ManagerBench], tmp_path: Path
) -> None:
    manager = make_manager(
        host_blocks=0, disk_blocks=20, disk_dir=str(tmp_path / "disk"), disk_offload_filter=False
    )
    leader, _ = manager.engine()
    told = Told(leader)
    store(leader, 1, KEYS[:8])
    manager.until(lambda: told.hear() == [[], sorted(KEYS[:8])])
    leader.send(Lookup(lookup=1, keys=join_keys(KEYS[:4])))
    answer(leader, LookupReply)
    assert told.hear() == [[], sorted(KEYS[:8])]


def test_a_mirror_knows_no_more_than_its_bound_and_what_goes_makes_room() -> None:
    mirror = Mirror(keys_max=4)

    def come(*keys: BlockKey) -> None:
        mirror.take_in(HeldBlocks(stored={HOST: join_keys(keys), DISK: join_keys(keys[:1])}))

    come(*KEYS[:4])
    come(*KEYS[4:6])
    assert (mirror.in_host(KEYS[:6]), mirror.held(KEYS[:6])) == (4, 5), "the disk's are counted apart"
    mirror.take_in(HeldBlocks(removed={HOST: join_keys(KEYS[3:6])}))
    come(KEYS[6])
    assert mirror.each_in_host(KEYS[:8]) == [True] * 3 + [False] * 3 + [True, False]
    mirror.take_in(HeldBlocks(complete=True))
    mirror.forget()
    assert (mirror.held(KEYS), mirror.complete) == (0, False)
