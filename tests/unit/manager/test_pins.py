"""Pins end at their time, with or without engines, and what they hold is not the engines' to lease."""

from __future__ import annotations

from kvbm.admin_protocol import Pin, Pinned, decode_from_manager
from kvbm.hashing import join_keys
from kvbm.protocol import PROTOCOL_VERSION, Hello, Ready, Welcome
from rigs.manager import KEYS, NAMESPACE, Client, ManagerBench, refusal, store


def operator(manager: ManagerBench) -> Client:
    admin = manager.client()
    admin.channel._decode = decode_from_manager
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    return admin


def pin(admin: Client, seconds: float, count: int = 3) -> Pinned:
    fingerprint = NAMESPACE.fingerprint.hex()
    admin.send(Pin(fingerprint=fingerprint, keys=join_keys(KEYS[:count]), seconds=seconds))
    return admin.expect(Pinned)


def test_a_pin_ends_at_its_time_without_engines_too(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:3])
    admin = operator(manager)
    assert pin(admin, 600.0).blocks == 3
    leader.close()
    worker.close()
    manager.until(lambda: not manager.server.engine_count)
    manager.tick(590.0)
    assert manager.space().host_pool.counts().leased == 3
    manager.tick(20.0)
    assert manager.space().host_pool.counts().leased == 0
    assert manager.metrics.value("kvbm_leases_expired_total") == 0


def test_what_is_pinned_is_not_the_engines_to_lease(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    admin = operator(manager)
    assert pin(admin, 600.0, 4).blocks == 4
    manager.tick()
    assert leader.expect(Ready).lease_blocks == int((16 - 4) * 0.75)


def test_a_pin_is_no_engines_hit(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:3])
    assert pin(operator(manager), 600.0).blocks == 3
    assert manager.metrics.value("kvbm_queried_blocks_total") == 0


def test_when_pins_hold_their_share_another_is_refused(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:6])
    admin = operator(manager)
    assert pin(admin, 600.0, 6).blocks == 4
    assert "take all of the 4 blocks" in pin(admin, 600.0, 3).refusal


def test_a_pin_of_more_than_a_week_is_refused(manager: ManagerBench) -> None:
    admin = operator(manager)
    admin.send(Pin(fingerprint="", keys=b"", seconds=1e9))
    assert "pin seconds=" in refusal(admin)
