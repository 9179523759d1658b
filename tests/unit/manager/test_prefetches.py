"""Prefetches and sessions over the manager's socket: verdicts in replies, operators, a restart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.admin_protocol import Describe, Description, Pin, Pinned, Prefetch, Prefetched
from kvbm.hashing import join_keys
from kvbm.hints import tenant_digest
from kvbm.manager.leases import PREFETCHES
from kvbm.protocol import Finished, Release, Reset, ResetReply
from rigs.fake_tier import FakeMedium, FakeTier
from rigs.manager import KEYS, NAMESPACE, Client, ManagerBench, connect_operator, refusal, store

FINGERPRINT = NAMESPACE.fingerprint.hex()
SALT = "a secret"
TENANT = tenant_digest(SALT)


@pytest.fixture
def manager(make_manager: Callable[..., ManagerBench], below: FakeTier) -> ManagerBench:
    return make_manager(host_blocks=32, disk_blocks=40, disk_offload_filter=False)


def request(leader: Client, number: int, keys: list[bytes], **said: object) -> tuple[tuple[str, ...], ...]:
    """A lookup and its end; what the manager said of its hint."""
    reply = leader.lookup(number, keys, hint=said, tenant=TENANT)  # type: ignore[arg-type]  # keys of a chain
    leader.send(Release(lookup=number))
    return reply.verdicts


def only_on_disk(manager: ManagerBench, below: FakeTier, leader: Client) -> None:
    below.release()
    manager.step()
    leader.take()
    leader.send(Reset(tier="host"))
    leader.expect(ResetReply)
    assert manager.space().host_pool.counts().resident == 0


def arrive(manager: ManagerBench, below: FakeTier) -> int:
    """All prefetches end; how many blocks lie in host memory then."""
    for _ in range(20):
        below.release()
        manager.step()
    assert manager.space().leases.of(PREFETCHES) == []
    return manager.space().host_pool.counts().resident


def known(manager: ManagerBench, below: FakeTier) -> tuple[Client, Client]:
    """A session of four blocks, which lie on disk only."""
    leader, worker = manager.engine()
    request(leader, 1, KEYS[:4], session="s")
    store(leader, worker, 1, KEYS[:4])
    leader.send(Finished(key=KEYS[3]))
    only_on_disk(manager, below, leader)
    return leader, worker


def test_the_reply_has_what_the_manager_decided_and_it_counts_once(
    manager: ManagerBench, below: FakeTier
) -> None:
    leader, _ = known(manager, below)
    (told,) = request(leader, 2, KEYS[50:52], session="new", prefetch=True)
    assert (told[:2], told[3]) == (("prefetch", "rejected"), "nothing")

    def hints(part: str, outcome: str, reason: str) -> float:
        return manager.metrics.value("kvbm_hints_total", part=part, outcome=outcome, reason=reason)

    assert hints("prefetch", "rejected", "nothing") == 1
    assert hints("prefetch", "accepted", "none") == 0
    assert request(leader, 3, KEYS[:1], session="s", prefetch=True) == ()
    assert hints("prefetch", "accepted", "none") == 1
    assert hints("session", "accepted", "none") == 3
    assert arrive(manager, below) == 4


def test_an_operator_brings_a_session_up(manager: ManagerBench, below: FakeTier) -> None:
    known(manager, below)
    admin = connect_operator(manager)

    def prefetch(session: str, tenant: str) -> Prefetched:
        admin.send(Prefetch(fingerprint=FINGERPRINT, session=session, tenant=tenant))
        return admin.expect(Prefetched)

    assert prefetch("s", "") == prefetch("other", TENANT) == Prefetched(blocks_max=8)
    found = prefetch("s", TENANT)
    assert (found.known, found.asked, found.blocks, found.ready) == (True, 4, 4, 0)
    assert arrive(manager, below) == 4
    assert prefetch("s", TENANT).ready == 4
    assert manager.metrics.value("kvbm_prefetched_blocks_total", cause="operator") == 4
    admin.send(Describe())
    (space,) = admin.expect(Description).spaces
    assert space.named_sessions == 1
    admin.send(Prefetch(fingerprint="00", session="s"))
    assert "no such namespace" in admin.expect(Prefetched).refusal


def test_engines_may_not_ask_as_operators_do(manager: ManagerBench, below: FakeTier) -> None:
    leader, _ = known(manager, below)
    leader.channel.send(Prefetch(fingerprint=FINGERPRINT, session="s", tenant=TENANT))
    assert "Prefetch" in refusal(leader)


def test_an_operators_prefetch_waits_for_engines_and_is_clipped(
    manager: ManagerBench, below: FakeTier
) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:12])
    store(leader, worker, 2, KEYS[100:104])
    only_on_disk(manager, below, leader)
    leader.lookup(3, KEYS[100:104])
    admin = connect_operator(manager)
    admin.send(Pin(fingerprint=FINGERPRINT, keys=join_keys(KEYS[:12]), seconds=0.0))
    found = admin.expect(Pinned)
    assert (found.blocks, found.ready, found.blocks_max) == (8, 0, 8), "a quarter of host memory"
    assert manager.space().leases.of(PREFETCHES) == [], "an engine waits for the disk"
    admin.send(Pin(fingerprint=FINGERPRINT, keys=join_keys(KEYS[:12]), seconds=0.0))
    assert "prefetches of this namespace take all of the 8 blocks" in admin.expect(Pinned).refusal
    assert arrive(manager, below) == 12
    leader.take()
    admin.send(Pin(fingerprint=FINGERPRINT, keys=join_keys(KEYS[:12]), seconds=0.0))
    found = admin.expect(Pinned)
    assert (found.blocks, found.ready) == (12, 8)


def test_a_prefetch_is_no_request(manager: ManagerBench, below: FakeTier) -> None:
    known(manager, below)
    asked = manager.metrics.value("kvbm_queried_blocks_total")
    admin = connect_operator(manager)
    admin.send(Pin(fingerprint=FINGERPRINT, keys=join_keys(KEYS[:4]), seconds=0.0))
    admin.expect(Pinned)
    assert arrive(manager, below) == 4
    assert manager.metrics.value("kvbm_queried_blocks_total") == asked


def test_after_a_restart_nothing_is_known_and_nothing_is_lost(
    make_manager: Callable[..., ManagerBench],
    media: list[FakeMedium],
    manager: ManagerBench,
    below: FakeTier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for client in known(manager, below):
        client.close()
    manager.open = False
    manager.server.close(keep=True)
    after = FakeTier(media[0], pending_limit=40)
    monkeypatch.setattr("kvbm.manager.assembly.open_disk_tier", lambda *args, **options: after)
    again = make_manager(host_blocks=32, disk_blocks=40, disk_offload_filter=False)
    leader, _ = again.engine()
    (told,) = request(leader, 1, KEYS[:1], session="s", prefetch=True)
    assert (told[0], told[3]) == ("prefetch", "nothing")
    arrive(again, after)
    leader.take()
    assert request(leader, 2, KEYS[:4], session="s", demote=True, expect_s=2.0) == ()
    arrive(again, after)
    leader.send(Finished(key=KEYS[3]))
    assert arrive(again, after) == 4, "what lay there before may be others'"


@pytest.mark.swallows("^ZeroDivisionError: division by zero$")
def test_a_namespace_that_fails_answers_without_a_word(manager: ManagerBench, below: FakeTier) -> None:
    leader, _ = known(manager, below)
    foresight = manager.space().foresight
    foresight.sessions.asked = lambda *args: 1 / 0  # type: ignore[method-assign, assignment]
    assert request(leader, 2, KEYS[:1], session="s", prefetch=True) == ()
    assert "ZeroDivisionError" in manager.space().failure
