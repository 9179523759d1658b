"""Every block that is dropped is counted once, with the reason."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.manager import pool
from kvbm.manager.disk_health import HEAL_S_MAX
from kvbm.manager.gauges import publish_gauges
from kvbm.manager.letting_go import DEMOTED
from kvbm.observe.metric_table import BY_NAME
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS as MANAGERS_KEYS
from rigs.manager import ManagerBench, store
from rigs.space import KEYS, ME, OTHER, Bench

NAME = "kvbm_evicted_blocks_total"


def evicted(bench: Bench) -> dict[tuple[str, str], float]:
    """By tier and reason, without the zeros."""
    publish_gauges([("m", bench.space)], bench.metrics)
    found = {key[1:]: value for key, value in bench.metrics.snapshot().items() if key[0] == NAME and value}
    return {(tier, reason): value for (tier, reason), value in found.items()}


def test_every_reason_has_its_series() -> None:
    reasons = BY_NAME[NAME].labels[1].values
    assert reasons == (
        pool.CAPACITY,
        pool.RESET,
        pool.CORRUPT,
        pool.MISSING,
        pool.TIER_OFF,
        DEMOTED,
        pool.EXPIRED,
    )


def test_room_for_others_and_a_reset(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4, disk_slots=6)
    bench.store(KEYS[:4])
    bench.finish_all()
    bench.store(OTHER[:3])
    bench.finish_all()
    assert evicted(bench) == {("host", "capacity"): 3, ("disk", "capacity"): 1}
    assert bench.space.clear("disk") == (6, 0)
    assert evicted(bench)["disk", "reset"] == 6
    assert bench.space.clear() == (4, 0)
    assert evicted(bench) == {
        ("host", "capacity"): 3,
        ("disk", "capacity"): 1,
        ("disk", "reset"): 6,
        ("host", "reset"): 4,
    }


def test_a_damaged_block_and_one_that_is_not_there(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.only_on_disk(KEYS[:1])
    bench.only_on_disk(OTHER[:2])
    before = evicted(bench)
    slots = {entry.key: slot for slot, entry in bench.medium.entries.items()}
    bench.medium.corrupt(slots[KEYS[0]])
    del bench.medium.entries[slots[OTHER[1]]]
    for number, keys in enumerate((KEYS[:1], OTHER[:2])):
        assert bench.space.lookup(ME, number, keys, 0) is not None
        bench.finish_all()
    assert evicted(bench) == {**before, ("disk", "corrupt"): 1, ("disk", "missing"): 1}


def test_what_a_tier_comes_back_without(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.only_on_disk(KEYS[:4])
    before = evicted(bench)
    bench.space.clear("disk")  # not counted yet when the tier goes off
    bench.only_on_disk(KEYS[:4])
    bench.tier.break_down()
    bench.space.pump()
    for slot in list(bench.medium.entries)[:3]:
        del bench.medium.entries[slot]
    bench.tier.mend()
    bench.clock.advance(HEAL_S_MAX)
    bench.space.pump()
    assert bench.tier.fault == ""
    host = {("host", "reset"): before["host", "reset"] + 4}
    assert evicted(bench) == {**before, **host, ("disk", "reset"): 4, ("disk", "tier_off"): 3}
    assert bench.metrics.value("kvbm_retries_total", operation="tier") >= 1


def test_what_a_namespace_dropped_just_before_its_end_is_counted(
    make_manager: Callable[..., ManagerBench], below: FakeTier
) -> None:
    manager = make_manager(host_blocks=4)
    leader, worker = manager.engine()
    store(leader, worker, 1, MANAGERS_KEYS[:4])
    manager.tick()
    store(leader, worker, 2, MANAGERS_KEYS[10:13])
    space = manager.space()
    manager.server.spaces.drop(space, keep=False)
    assert manager.metrics.value(NAME, tier="host", reason="capacity") == 3
