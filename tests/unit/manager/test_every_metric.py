"""Every metric of the table moves when what it counts happens. A new one needs an action here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvbm.block import NO_COUNT
from kvbm.hashing import join_keys
from kvbm.manager.lookups import LEASE_S
from kvbm.manager.write_behind import RemoteRules
from kvbm.observe.metric_table import TABLE
from kvbm.observe.remote_metrics import REMOTE_METRICS
from kvbm.policy import AdmitAll
from kvbm.protocol import Commit, Finished, Release, Reserve, ReserveReply, Reset, ResetReply
from rigs.fake_remote import FakeRemote, FakeStore
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, LAYOUT, ManagerBench, store

OF_A_STORE = {
    "kvbm_offload_blocks_d2o",
    "kvbm_onboard_blocks_o2d",
    "kvbm_object_cache_hit_rate",
    "kvbm_object_read_failures",
    "kvbm_object_write_failures",
    *(metric.name for metric in REMOTE_METRICS if not metric.name.startswith("kvbm_peer_")),
}
"""The series of a remote store: without one they stay 0, or are not there."""
OF_A_FLEET = {metric.name for metric in REMOTE_METRICS} - OF_A_STORE
"""Those of other nodes (`test_fleet_seen` moves them)."""


def moved(manager: ManagerBench) -> set[str]:
    """The metrics of which a series is not 0."""
    manager.tick()
    return {name for (name, *_), value in manager.metrics.snapshot().items() if value}


def test_every_metric_moves(make_manager: Callable[..., ManagerBench], below: FakeTier) -> None:
    manager = make_manager(disk_blocks=32, disk_offload_filter=False)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    seen = moved(manager)
    assert "kvbm_queue_blocks" in seen, "the writes wait for the disk"
    below.release()
    manager.step()
    leader.send(Reset(tier="host"))
    assert leader.expect(ResetReply).dropped == 4

    # A load from disk, and then one from host memory of which a block does not arrive.
    leader.lookup(2, KEYS[:4])
    below.release()
    seen |= moved(manager)
    leader.take()  # its progress
    leader.send(Release(lookup=2, loaded=4, seconds=0.1, answer_s=0.01, wait_s=0.2, prefill_s=1.0))
    leader.lookup(3, KEYS[:4], hint={"session": "s", "final": 1})
    seen |= moved(manager)
    leader.send(Release(lookup=3, loaded=3, failed=1, seconds=0.1, unloaded={"failed": 1}))

    # A session whose blocks are brought up when it is expected back, as far as there is room, and asked for.
    leader.lookup(10, KEYS[:4], hint={"session": "s", "expect_s": 10.0})
    leader.send(Release(lookup=10))
    leader.send(Finished(key=KEYS[3]))
    leader.send(Reset(tier="host"))
    leader.expect(ResetReply)
    manager.tick(9.0)
    manager.step()
    below.release()
    manager.step()
    leader.lookup(11, KEYS[:4])
    below.release()
    seen |= moved(manager)
    leader.send(Release(lookup=11))
    leader.take()

    # A lease that nobody ends, and more blocks than there is room for.
    leader.lookup(4, KEYS[:4])
    manager.tick(LEASE_S + 1)
    store(leader, worker, 5, KEYS[100:112])
    below.release()
    manager.step()
    leader.reserve(6, KEYS[200:232])
    leader.take()

    # A few of those are offered again. Their slots are committed, and the engine says how long it waited for them.
    leader.send(Reserve(store=8, parent=b"", keys=join_keys(KEYS[230:232]), again=True))
    leader.expect(ReserveReply)
    leader.send(Commit(store=8, answer_s=0.02))

    # A prefix that the latest requests began with, and that is gone.
    leader.send(Reset())
    leader.expect(ResetReply)
    assert leader.lookup(7, KEYS[:4]).slots == ()
    seen |= moved(manager)

    # What is retained goes when nothing else may: all other slots are being filled.
    leader.send(Commit(store=6))
    leader.send(Reset())
    leader.expect(ResetReply)
    store(leader, worker, 9, KEYS[:4])
    leader.lookup(10, KEYS[:4], hint={"retain": [{"min_ttl": 600}]})
    leader.send(Release(lookup=10))
    below.release()
    manager.tick()
    seen |= moved(manager)
    leader.reserve(11, KEYS[400:416])
    seen |= moved(manager)
    missing = {metric.name for metric in TABLE} - seen
    assert missing - OF_A_STORE - OF_A_FLEET == {"kvbm_offload_blocks_d2d"}, (
        "which only counts where disk is alone"
    )
    assert missing >= OF_A_STORE | OF_A_FLEET
    assert {"kvbm_peer_links", "kvbm_peer_nodes", "kvbm_peer_directory_away"} == OF_A_FLEET


def test_every_metric_of_a_remote_store_moves(
    make_manager: Callable[..., ManagerBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager()
    shared = FakeStore(LAYOUT)
    remote = FakeRemote(shared)
    rules = RemoteRules(linger_s=1.0)
    opening = SimpleNamespace(open=lambda *_: [(remote, rules, AdmitAll())])
    monkeypatch.setattr(manager.server.spaces, "_remote", opening)
    leader, worker = manager.engine()

    def settle() -> None:
        manager.tick(2.0)
        while remote.release():
            manager.step()

    store(leader, worker, 1, KEYS[:4])
    assert manager.metrics.value("kvbm_remote_known_blocks") == 0
    settle()
    seen = moved(manager)
    assert manager.metrics.value("kvbm_remote_requests_total", kind="put") == 1
    leader.send(Reset(tier="host"))
    assert leader.expect(ResetReply).dropped == 4

    # A load from the store that reaches the device, and one of which the store has lost a block and damaged another.
    leader.lookup(2, KEYS[:4])
    settle()
    leader.take()
    leader.send(Release(lookup=2, loaded=4, seconds=0.1))
    seen |= moved(manager)
    leader.send(Reset(tier="host"))
    leader.expect(ResetReply)
    shared.lose(KEYS[2:3])
    shared.corrupt(KEYS[1])
    leader.lookup(3, KEYS[:4])
    settle()
    seen |= moved(manager)
    assert manager.metrics.value("kvbm_object_read_failures") == 2
    assert manager.metrics.value("kvbm_failures_total", tier="remote", kind="corrupt") == 1
    assert manager.metrics.value("kvbm_failures_total", tier="remote", kind="io") == 0, (
        "others may remove blocks"
    )
    leader.send(Release(lookup=3))
    leader.take()

    # The store fails while it writes, is off, and answers slowly.
    store(leader, worker, 4, KEYS[10:12])
    manager.tick(2.0)
    manager.until(lambda: remote.pending_count, "the blocks are written")
    remote.break_down()
    seen |= moved(manager)
    for state in ("open", "closed"):
        number = manager.metrics.value("kvbm_remote_breakers", operation="read", state=state)
        assert number == (state == "open")
    assert manager.metrics.value("kvbm_tier_up", tier="remote") == 0
    assert [message.tiers for message in leader.take()] == [{"host": 16}], "engines learn it"
    store(leader, worker, 5, KEYS[20:22])
    seen |= moved(manager)
    remote.mend()
    remote.errors, remote.compressed, remote.seconds = 3, 2, 0.05
    remote.touch_errors, remote.links = 4, {"tcp": 1}
    seen |= moved(manager)
    assert [message.tiers for message in leader.take()] == [{"host": 16, "remote": NO_COUNT}]
    assert manager.metrics.value("kvbm_remote_errors_total", operation="touch") == 4
    assert manager.metrics.value("kvbm_remote_compressed_packs_total") == 2
    moved(manager)
    assert manager.metrics.value("kvbm_remote_compressed_packs_total") == 2, "it counts what is new"
    assert OF_A_STORE - seen == set()


def test_disk_alone_counts_from_device_to_disk(
    make_manager: Callable[..., ManagerBench], below: FakeTier
) -> None:
    manager = make_manager(
        host_blocks=None, disk_blocks=32, staging_bytes=8 * LAYOUT.slot_bytes, disk_offload_filter=False
    )
    store(*manager.engine(), 1, KEYS[:4])
    below.release()
    assert "kvbm_offload_blocks_d2d" in moved(manager)
