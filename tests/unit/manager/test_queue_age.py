"""The age of a queue: right to the time between two looks, and of the oldest block, whatever it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvbm.manager.gauges import publish_gauges
from kvbm.manager.queue_age import QueueAge
from rigs.space import KEYS, ME, OTHER, Bench

NAME = "kvbm_queue_age_seconds"
LONGEST_STEP_S = 5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, LONGEST_STEP_S)), max_size=60))
def test_an_age_is_never_too_long_and_short_by_a_look_at_most(
    steps: list[tuple[int, int, int]],
) -> None:
    age, entered, left, now_s = QueueAge(), deque[int](), 0, 0
    for come, go, seconds in steps:
        entered += [now_s] * come
        for _ in range(min(go, len(entered))):
            entered.popleft()
            left += 1
        now_s += seconds
        shown = age.look(left, len(entered), now_s)
        true = now_s - entered[0] if entered else 0
        assert max(0, true - LONGEST_STEP_S) <= shown <= true
        assert len(age._marks) <= len(entered), "bounded by the queue"
    assert age.look(left + len(entered), 0, now_s + 1) == 0.0


def shown(bench: Bench, queue: str) -> float:
    """The gauge, brought up to date."""
    publish_gauges([("m", bench.space)], bench.metrics)
    return bench.metrics.value(NAME, queue=queue)


def test_the_offload_queue_ages_while_blocks_wait_for_their_turn_and_for_the_disk(
    make: Callable[..., Bench],
) -> None:
    bench = make(host_slots=16, pending_limit=1)
    assert shown(bench, "offload") == 0.0
    bench.store(KEYS[:2])  # one is being written, the other waits
    bench.clock.advance(3.0)
    assert shown(bench, "offload") == 3.0
    bench.store(OTHER[:1])
    bench.clock.advance(4.0)
    assert shown(bench, "offload") == 7.0, "the one that is being written"
    assert bench.tier.release() == 1
    bench.space.pump()
    assert shown(bench, "offload") == 4.0, "the second, first seen 4 s ago, is being written now"
    assert shown(bench, "onboard") == 0.0
    bench.finish_all()
    bench.clock.advance(1.0)
    assert shown(bench, "offload") == 0.0
    bench.store(OTHER[10:12])
    bench.clock.advance(2.0)
    assert shown(bench, "offload") == 2.0


def test_blocks_that_leave_the_queue_unwritten_age_nobody(make: Callable[..., Bench]) -> None:
    bench = make(pending_limit=1)
    bench.store(KEYS[:4])
    bench.clock.advance(2.0)
    assert shown(bench, "offload") == 2.0
    bench.space.clear("host")  # those that wait are gone, the one that is being written is pinned
    bench.finish_all()
    bench.clock.advance(10.0)
    bench.store(OTHER[:2])
    bench.clock.advance(1.0)
    assert shown(bench, "offload") == 1.0


def test_a_full_disk_does_not_age_what_comes_later(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16, disk_slots=2)
    bench.only_on_disk(KEYS[:2])
    assert bench.space.lookup(ME, 1, KEYS[:2], 0) is not None
    bench.space.pump()
    bench.store(OTHER[:3])  # the disk is full of blocks that are being read: these are refused
    assert bench.space.disk is not None and bench.space.disk.offloader.queued_count == 2, (
        "one after the other"
    )
    assert shown(bench, "offload") == 0.0
    bench.space.pump()
    assert bench.space.disk.offloader.queued_count == 0
    bench.clock.advance(5.0)
    assert shown(bench, "offload") == 0.0
    bench.finish_all()
    bench.space.release(ME, 1)
    bench.store(OTHER[10:12])
    bench.clock.advance(2.0)
    assert shown(bench, "offload") == 2.0


def test_the_onboard_queue_ages_until_the_disk_answers_or_nobody_waits(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16, pending_limit=1)
    bench.only_on_disk(KEYS[:3])
    bench.only_on_disk(OTHER[:1])
    assert bench.space.lookup(ME, 1, KEYS[:3], 0) is not None
    bench.clock.advance(2.0)
    assert bench.space.lookup(ME, 2, OTHER[:1], 0) is not None
    bench.clock.advance(1.0)
    assert shown(bench, "onboard") == 3.0
    bench.space.release(ME, 1)  # its read goes on, and those that waited are given up
    bench.space.pump()
    assert shown(bench, "onboard") == 3.0
    assert bench.tier.release() == 1
    bench.space.pump()
    assert shown(bench, "onboard") == 1.0
    bench.finish_all()
    bench.clock.advance(1.0)
    assert shown(bench, "onboard") == 0.0


def test_reads_that_nobody_waits_for_any_more_age_nobody(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=16, pending_limit=1)
    bench.only_on_disk(KEYS[:3])
    bench.only_on_disk(OTHER[:1])
    bench.store(OTHER[20:21])  # a write that takes all the room there is
    assert bench.space.lookup(ME, 1, KEYS[:3], 0) is not None
    bench.clock.advance(2.0)
    assert bench.space.lookup(ME, 2, OTHER[:1], 0) is not None
    bench.clock.advance(1.0)
    assert shown(bench, "onboard") == 3.0
    bench.space.release(ME, 1)
    bench.space.pump()
    assert shown(bench, "onboard") == 1.0
    bench.space.release(ME, 2)
    bench.space.pump()
    assert shown(bench, "onboard") == 0.0


def test_the_oldest_of_all_namespaces_counts(make: Callable[..., Bench]) -> None:
    old, young = make(), make()
    for bench, seconds in ((young, 1.0), (old, 5.0)):
        bench.store(KEYS[:1])
        bench.clock.advance(seconds)
    for spaces in ([old.space, young.space], [young.space, old.space]):
        publish_gauges([("m", space) for space in spaces], old.metrics)
        assert old.metrics.value(NAME, queue="offload") == 5.0
