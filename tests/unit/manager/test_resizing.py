"""Another size of host memory while the manager serves: what is carried, what ends, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm.admin_protocol import Pin, Pinned, Resized
from kvbm.hashing import join_keys
from kvbm.manager import carrying
from kvbm.protocol import Commit, Release, Reset, ResetReply
from kvbm.testing.oracle import block_bytes
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, LAYOUT, NAMESPACE, OTHER, ManagerBench, store
from rigs.resizing import PassingClock, begin, come_back, holds, operator, resize, sent_away


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block in a turn, so that much can happen between two of them."""
    monkeypatch.setattr(carrying, "PIECE_BLOCKS_MAX", 1)
    monkeypatch.setattr(carrying, "SCANNED_AT_ONCE", 4)


@pytest.fixture
def busy(make_manager: Callable[..., ManagerBench]) -> ManagerBench:
    """A manager that carries one block in a turn."""
    return make_manager(clock=PassingClock(50.0))


@pytest.mark.parametrize("blocks", [24, 100])
def test_all_blocks_are_there_in_larger_memory(manager: ManagerBench, blocks: int) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:10])
    reply = resize(operator(manager), blocks)
    assert (reply.blocks_before, reply.carried, reply.dropped, reply.slots) == (10, 10, 0, blocks)
    assert (reply.before_bytes, reply.after_bytes) == (16 * LAYOUT.block_bytes, blocks * LAYOUT.block_bytes)
    sent_away(leader, worker)
    leader, worker = come_back(manager)
    assert worker.welcome.slot_count == blocks
    assert holds(leader, worker, 1, KEYS[:12]) == 10
    more = KEYS[100 : 100 + blocks - 10]
    assert -2 not in store(leader, worker, 2, more)
    assert manager.space().host_pool.counts().free == 0
    manager.tick()
    assert manager.metrics.value("kvbm_pool_capacity_blocks", tier="host") == blocks


def test_smaller_memory_keeps_the_blocks_that_were_used_last(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    for number, start in enumerate((0, 100, 200), 1):
        store(leader, worker, number, KEYS[start : start + 5])
        manager.clock.advance(1.0)
    leader.lookup(10, KEYS[:5])
    manager.step(10)
    leader.send(Release(lookup=10))
    reply = resize(operator(manager), 10)
    assert (reply.blocks_before, reply.carried, reply.dropped) == (15, 10, 5)
    sent_away(leader, worker)
    leader, worker = come_back(manager)
    found = [holds(leader, worker, n, KEYS[start : start + 5]) for n, start in enumerate((0, 100, 200))]
    assert found == [5, 0, 5]
    manager.tick()
    assert manager.metrics.value("kvbm_evicted_blocks_total", tier="host", reason="capacity") == 5


def test_the_manager_serves_while_blocks_are_carried(busy: ManagerBench) -> None:
    leader, worker = busy.engine()
    store(leader, worker, 1, KEYS[:8])
    admin = operator(busy)
    begin(admin, 32)
    busy.step(2)
    assert holds(leader, worker, 1, KEYS[:8]) == 8
    store(leader, worker, 2, KEYS[100:104])
    reply = admin.expect(Resized)
    assert (reply.blocks_before, reply.carried) == (8, 12)
    sent_away(leader, worker)
    leader, worker = come_back(busy)
    assert holds(leader, worker, 1, KEYS[:8]) == 8
    assert holds(leader, worker, 2, KEYS[100:104]) == 4


def test_a_chain_that_grows_meanwhile_is_carried_to_its_end(busy: ManagerBench) -> None:
    leader, worker = busy.engine()
    store(leader, worker, 1, KEYS[:6])
    admin = operator(busy)
    begin(admin, 32)
    carried = busy.server.resizing
    busy.until(lambda: [each.carried for each in carried.under_way] == [3])
    slots = leader.reserve(2, KEYS[6:9], parent=KEYS[5])
    for key, slot in zip(KEYS[6:9], slots, strict=True):
        worker.write(slot, key)
    leader.send(Commit(store=2))
    assert admin.expect(Resized).carried == 9
    sent_away(leader, worker)
    assert holds(*come_back(busy), 1, KEYS[:9]) == 9


def test_what_was_promised_before_can_still_be_read_where_it_was(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:8])
    promised = leader.lookup(1, KEYS[:8])
    resize(operator(manager), 9)
    for key, slot in zip(KEYS, promised.slots, strict=False):
        assert worker.read(slot) == block_bytes(key, 0, worker.welcome.slot_bytes)
    sent_away(leader, worker)
    _, again = come_back(manager)
    assert again.welcome.epoch != worker.welcome.epoch


def test_a_store_under_way_ends_with_the_memory_that_it_writes_to(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    slots = leader.reserve(1, KEYS[:4])
    assert resize(operator(manager), 32).carried == 0
    for key, slot in zip(KEYS, slots, strict=False):
        worker.write(slot, key, nonce=9)  # a slow rank
    sent_away(leader, worker)
    manager.check()
    leader, worker = come_back(manager)
    assert manager.space().host_pool.counts().filling == 0
    assert holds(leader, worker, 1, KEYS[:4]) == 0
    store(leader, worker, 2, KEYS[:4])
    assert holds(leader, worker, 2, KEYS[:4]) == 4


def test_a_pin_is_kept_where_it_fits(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    store(leader, worker, 2, KEYS[100:104])
    admin = operator(manager)
    admin.send(Pin(fingerprint=NAMESPACE.fingerprint.hex(), keys=join_keys(KEYS[:3]), seconds=600.0))
    assert admin.expect(Pinned).blocks == 3
    assert resize(admin, 12).pins_ended == 0
    assert manager.space().host_pool.counts().leased == 3
    sent_away(leader, worker)
    leader, worker = come_back(manager)
    store(leader, worker, 1, KEYS[200:212])
    assert holds(leader, worker, 1, KEYS[:3]) == 3
    assert resize(admin, 8).pins_ended == 1
    assert manager.space().host_pool.counts().leased == 0


def test_a_reset_meanwhile_counts(busy: ManagerBench) -> None:
    leader, worker = busy.engine()
    store(leader, worker, 1, KEYS[:8])
    admin = operator(busy)
    begin(admin, 32)
    busy.step(4)
    leader.send(Reset())
    assert leader.expect(ResetReply).dropped == 8
    reply = admin.expect(Resized)
    assert (reply.carried, reply.dropped) == (0, 8)
    assert busy.space().host_pool.counts().resident == 0


def test_a_second_one_is_refused_while_one_is_under_way(busy: ManagerBench) -> None:
    leader, worker = busy.engine()
    store(leader, worker, 1, KEYS[:8])
    admin, other = operator(busy), operator(busy)
    begin(admin, 32)
    busy.step(2)
    assert resize(other, 20).refusal == "another resize is under way"
    assert admin.expect(Resized).slots == 32
    assert resize(other, 20).slots == 20


def test_an_operator_who_leaves_does_not_stop_it(busy: ManagerBench) -> None:
    leader, worker = busy.engine()
    store(leader, worker, 1, KEYS[:8])
    admin = operator(busy)
    begin(admin, 32)
    busy.step(2)
    admin.close()
    busy.until(lambda: busy.space().arena.slot_count == 32)


def test_an_engine_that_dies_meanwhile_costs_only_its_own(busy: ManagerBench) -> None:
    leader, worker = busy.engine()
    store(leader, worker, 1, KEYS[:8])
    leader.lookup(1, KEYS[:8])
    admin = operator(busy)
    begin(admin, 12)
    busy.step(3)
    leader.close()
    worker.close()
    reply = admin.expect(Resized)
    assert (reply.slots, reply.carried) == (12, 8)
    busy.tick()
    assert not busy.server.engine_count
    leader, worker = busy.engine()
    assert holds(leader, worker, 1, KEYS[:8]) == 8


def test_without_memory_nothing_is_changed(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:8])
    manager.server.resizing.available_bytes = lambda: 30 * LAYOUT.block_bytes
    admin = operator(manager)
    refusal = resize(admin, 31).refusal
    assert refusal.startswith("--host=")
    assert "are needed beside the present" in refusal
    assert "in all" in resize(admin, 1 << 50).refusal
    assert "at least one block" in resize(admin, 0).refusal
    assert manager.space().arena.slot_count == 16
    assert holds(leader, worker, 1, KEYS[:8]) == 8
    # On a shrink too: what is leased, or locked by a device, does not make room before.
    manager.server.resizing.available_bytes = lambda: 8 * LAYOUT.block_bytes - 1
    assert "are needed beside the present" in resize(admin, 8).refusal
    manager.server.resizing.available_bytes = lambda: 8 * LAYOUT.block_bytes
    assert resize(admin, 8).slots == 8


def test_pages_of_the_new_memory_are_touched_where_those_of_the_old_were(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, worker = manager.engine()
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(carrying.HostArena, "touch", lambda arena, *where: touched.append(where))
    assert resize(operator(manager), 32).refusal == ""
    assert touched == [(0, -1)]
    leader.close()
    worker.close()


@pytest.mark.swallows("^OSError: no such luck$")
@pytest.mark.parametrize("blocks", [10, 32])
@pytest.mark.parametrize("good_copies", [0, 3])
def test_a_copy_that_fails_leaves_the_memory_that_there_is(
    make_manager: Callable[..., ManagerBench], monkeypatch: pytest.MonkeyPatch, blocks: int, good_copies: int
) -> None:
    manager = make_manager()
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:8])
    copy, left = carrying.HostArena.copy_slots, iter(range(good_copies))

    def copies(*args: Any) -> None:
        if next(left, None) is None:
            raise OSError("no such luck")
        copy(*args)

    monkeypatch.setattr(carrying.HostArena, "copy_slots", copies)
    admin = operator(manager)
    refusal = resize(admin, blocks).refusal
    assert "keeps its size" in refusal
    assert "no such luck" in refusal
    assert ("its engines connect again: 'e'" in refusal) == (blocks < 16)
    if blocks < 16:  # memory of slots was given back: ranks map what there is anew
        sent_away(leader, worker)
        before = worker.welcome.epoch
        leader, worker = come_back(manager)
        assert worker.welcome.epoch != before
    assert worker.welcome.slot_count == 16
    assert holds(leader, worker, 1, KEYS[:8]) == 8
    store(leader, worker, 2, KEYS[100:108])
    assert holds(leader, worker, 2, KEYS[100:108]) == 8
    manager.check()
    monkeypatch.undo()
    assert resize(admin, blocks).slots == blocks


def test_two_namespaces_share_the_new_size(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(namespaces=2, host_blocks=32)
    first, second = manager.engine("a"), manager.engine("b", namespace=OTHER)
    for leader, worker in (first, second):
        store(leader, worker, 1, KEYS[:6])
    reply = resize(operator(manager), 16)
    assert (reply.slots, reply.carried) == (16, 12)
    assert [manager.space(n).arena.slot_count for n in (0, 1)] == [8, 8]
    for name, engine, hello in (("a", first, {}), ("b", second, {"namespace": OTHER})):
        sent_away(*engine)
        assert holds(*come_back(manager, name, **hello), 5, KEYS[:6]) == 6


def test_a_namespace_that_comes_meanwhile_ends_it(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager(namespaces=2, host_blocks=32, clock=PassingClock(50.0))
    leader, worker = manager.engine("a")
    store(leader, worker, 1, KEYS[:6])
    admin = operator(manager)
    begin(admin, 64)
    manager.step(2)
    manager.engine("b", namespace=OTHER)
    assert "came, went or failed meanwhile" in admin.expect(Resized).refusal
    assert [manager.space(n).arena.slot_count for n in (0, 1)] == [16, 16]
    assert holds(leader, worker, 1, KEYS[:6]) == 6


@pytest.mark.parametrize(
    ("settings", "before_bytes"),
    [
        ({"host_blocks": 16}, 0),
        ({"host_blocks": None, "host_bytes": 16 * LAYOUT.block_bytes}, 16 * LAYOUT.block_bytes),
    ],
)
def test_before_the_first_engine_it_is_the_size_that_the_first_one_gets(
    make_manager: Callable[..., ManagerBench], settings: dict[str, Any], before_bytes: int
) -> None:
    """How many bytes 16 blocks have nobody knows before an engine has said it."""
    manager = make_manager(**settings)
    reply = resize(operator(manager), 5)
    assert (reply.slots, reply.before_bytes, reply.after_bytes) == (0, before_bytes, 5 * LAYOUT.block_bytes)
    _, worker = manager.engine()
    assert worker.welcome.slot_count == 5


def test_blocks_of_an_ephemeral_namespace_stay(manager: ManagerBench) -> None:
    passing = msgspec.structs.replace(NAMESPACE, ephemeral=True)
    leader, worker = manager.engine(namespace=passing)
    store(leader, worker, 1, KEYS[:6])
    resize(operator(manager), 32)
    sent_away(leader, worker)
    manager.tick()
    leader, worker = come_back(manager, namespace=passing)
    assert holds(leader, worker, 1, KEYS[:6]) == 6
    leader.close()
    worker.close()
    manager.until(lambda: not list(manager.server.spaces))


def test_an_engine_that_never_comes_back_is_forgotten(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    resize(operator(manager), 32)
    sent_away(leader, worker)
    assert manager.server.engine_count == 1
    manager.tick(3600.0)
    manager.tick()
    assert manager.server.engine_count == 0


def test_a_staging_area_is_refused(
    make_manager: Callable[..., ManagerBench], below: FakeTier, tmp_path: Path
) -> None:
    manager = make_manager(
        host_blocks=None, disk_blocks=40, disk_dir=str(tmp_path), staging_bytes=16 * LAYOUT.block_bytes
    )
    manager.engine()
    assert "only the way to disk" in resize(operator(manager), 32).refusal


@pytest.mark.parametrize("disk_write", ["through", "eviction"])
def test_disk_goes_on_with_the_new_memory(
    make_manager: Callable[..., ManagerBench], below: FakeTier, disk_write: str
) -> None:
    manager = make_manager(
        disk_blocks=40, disk_offload_filter=False, disk_write=disk_write,
        max_concurrent_transfers=3, max_transfer_batch_size=1,
    )  # fmt: skip
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:8])
    manager.step()
    assert manager.space().disk.offloader.queued_count == (8 if disk_write == "through" else 0)
    admin = operator(manager)
    assert resize(admin, 12).carried == 8  # with writes under way, and others that wait
    sent_away(leader, worker)
    leader, worker = come_back(manager)
    # Others take the place of the first, not faster than these can be written on their eviction.
    for start in range(100, 112, 4):
        store(leader, worker, start, KEYS[start : start + 4])
        for _ in range(40):
            below.release()
            manager.step()
    manager.space().check()
    assert not manager.space().busy
    manager.space().clear("host")
    found = leader.lookup(3, KEYS[:8])
    for _ in range(20):
        below.release()
        manager.step()
    assert len(found.slots) == 8
    for key, slot in zip(KEYS, found.slots, strict=False):
        assert worker.read(slot) == block_bytes(key, 0, worker.welcome.slot_bytes)


def test_a_read_under_way_ends_in_the_memory_that_it_was_for(
    make_manager: Callable[..., ManagerBench], below: FakeTier
) -> None:
    manager = make_manager(disk_blocks=40, disk_offload_filter=False)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:8])
    manager.until(lambda: below.release() + len(below.medium.entries) == 8)
    manager.step()
    manager.space().clear("host")
    assert len(leader.lookup(1, KEYS[:8]).slots) == 8
    admin = operator(manager)
    assert resize(admin, 12).carried == 0
    assert "still use the memory" in resize(admin, 14).refusal
    sent_away(leader, worker)
    leader, worker = come_back(manager)
    store(leader, worker, 2, KEYS[100:112])
    for _ in range(20):
        below.release()
        manager.step()
    assert holds(leader, worker, 2, KEYS[100:112]) == 12
    assert resize(admin, 14).slots == 14
    manager.check()
