"""The end of spaces: all tiers within one deadline, though calls to some of them do not end."""

from __future__ import annotations

import threading

import pytest

from kvbm.manager.closing import CLOSE_S_MAX, RELEASE_S_MIN, close_spaces, drop_space
from rigs.space import KEYS, OTHER, Bench

DEADLINE_S = 30.0


def test_a_tier_that_takes_long_to_close_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends only after the second, whose blocks are written meanwhile."""
    benches, closed, in_order = [Bench(), Bench()], threading.Event(), list[bool]()
    first, second = (bench.tier.close for bench in benches)

    def close_first(keep: bool, deadline_s: float) -> None:
        in_order.append(closed.wait(DEADLINE_S / 10))
        first(keep, deadline_s)

    def close_second(keep: bool, deadline_s: float) -> None:
        second(keep, deadline_s)
        closed.set()

    for bench, keys, close in zip(benches, (KEYS, OTHER), (close_first, close_second), strict=True):
        bench.store(keys[:3])
        monkeypatch.setattr(bench.tier, "close", close)
    close_spaces([bench.space for bench in benches], keep=True, deadline_s=DEADLINE_S)
    assert in_order == [True]
    assert {entry.key for entry in benches[1].medium.entries.values()} == set(OTHER[:3])
    for bench in benches:
        bench.open = False
        bench.close()


def test_a_tier_whose_close_does_not_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, opened, ended = Bench(), threading.Event(), threading.Event()
    genuine = bench.tier.close

    def close(keep: bool, deadline_s: float) -> None:
        assert opened.wait(DEADLINE_S)
        genuine(keep, deadline_s)
        ended.set()

    monkeypatch.setattr(bench.tier, "close", close)
    close_spaces([bench.space], keep=True, deadline_s=RELEASE_S_MIN)
    opened.set()
    assert ended.wait(DEADLINE_S)
    bench.open = False
    bench.close()


def test_all_that_is_waited_for_fits_into_the_five_seconds_of_an_orderly_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, left_s = Bench(), list[float]()
    genuine = bench.tier.close
    monkeypatch.setattr(bench.tier, "close", lambda keep, deadline_s: left_s.append(deadline_s))
    close_spaces([bench.space], keep=True)
    assert 0.0 < left_s[0] <= CLOSE_S_MAX < 5.0
    bench.open = False
    genuine(keep=False)


def test_a_space_that_is_dropped_waits_for_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for its disk, nor until the kernel has taken back its memory."""
    bench.store(KEYS[:3])
    left_s, opened, ended = list[float](), threading.Event(), threading.Event()
    close_disk, close_arena = bench.tier.close, bench.space.arena.close

    def close() -> None:
        assert opened.wait(DEADLINE_S)
        close_arena()
        ended.set()

    monkeypatch.setattr(bench.tier, "close", lambda keep, deadline_s: left_s.append(deadline_s))
    monkeypatch.setattr(bench.space.arena, "close", close)
    drop_space(bench.space, keep=True)
    assert left_s == [0.0]
    opened.set()
    assert ended.wait(DEADLINE_S)
    bench.open = False
    close_disk(keep=False)


@pytest.mark.parametrize("dropped", [False, True])
def test_all_is_released_where_no_thread_is_to_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dropped: bool
) -> None:
    benches = [Bench(), Bench()]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        if dropped:
            for bench in benches:
                drop_space(bench.space, keep=True)
        else:
            close_spaces([bench.space for bench in benches], keep=True)
    assert "without a thread" in caplog.text
    for bench in benches:
        assert all(region.closed for region in bench.space.arena._regions)
        bench.open = False
        bench.close()


@pytest.mark.swallows("^OSError: the device is gone$")
def test_a_tier_that_fails_as_it_is_closed_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    benches = [Bench(), Bench()]

    def fail(keep: bool, deadline_s: float) -> None:
        raise OSError("the device is gone")

    genuine = benches[0].tier.close
    monkeypatch.setattr(benches[0].tier, "close", fail)
    for bench in benches:
        bench.store(KEYS[:3])
    close_spaces([bench.space for bench in benches], keep=True)
    assert len(benches[1].medium.entries) == 3
    genuine(keep=False)
    for bench in benches:
        bench.open = False
        bench.close()
