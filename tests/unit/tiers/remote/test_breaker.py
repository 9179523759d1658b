"""A breaker opens, waits longer each time, and closes by itself."""

from __future__ import annotations

import random

import pytest

from kvbm.clock import ManualClock
from kvbm.tiers.remote.breaker import Breaker, BreakerState


class NoJitter(random.Random):
    def random(self) -> float:
        return 0.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock, NoJitter(), errors_max=3, wait_s=1.0, wait_max_s=4.0)


def test_errors_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed("failed", "500")
    breaker.succeeded()
    for _ in range(2):
        breaker.failed("failed", "500")
    assert breaker.closed
    breaker.failed("throttled", "slow down")
    assert breaker.state is BreakerState.OPEN
    assert (breaker.trouble, breaker.line, breaker.openings) == ("throttled", "slow down", 1)


def test_two_late_answers_open_it(breaker: Breaker) -> None:
    breaker.late("silence")
    assert breaker.closed
    breaker.late("silence")
    assert breaker.trouble == "slow"


@pytest.mark.parametrize("trouble", ["refused", "full"])
def test_some_troubles_open_it_at_once(breaker: Breaker, trouble: str) -> None:
    breaker.failed(trouble, "no")  # type: ignore[arg-type]
    assert not breaker.closed


def test_one_probe_at_a_time_decides(breaker: Breaker, clock: ManualClock) -> None:
    breaker.failed("refused", "no")
    assert not breaker.probe_due()
    breaker.succeeded()
    assert not breaker.closed, "an old answer"
    clock.advance(1.0)
    assert breaker.probe_due() and not breaker.probe_due()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.probed(None)
    assert breaker.closed and breaker.trouble is None and breaker.line == ""


def wait_for_probe(breaker: Breaker, clock: ManualClock) -> float:
    """Let time pass until a probe is due, and begin it; how long that took, s, to a 1024th."""
    for step in range(8 * 1024):
        if breaker.probe_due():
            return step / 1024
        clock.advance(1 / 1024)
    raise AssertionError("no probe is due")


def test_waits_grow_to_a_bound(breaker: Breaker, clock: ManualClock) -> None:
    breaker.failed("refused", "no")
    waits = []
    for _ in range(5):
        waits.append(wait_for_probe(breaker, clock))
        breaker.probed("unreachable", "still")
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0] and breaker.line == "still"


def test_one_that_opens_again_soon_waits_longer(breaker: Breaker, clock: ManualClock) -> None:
    for wait_s in (1.0, 2.0):
        breaker.failed("full", "no")
        assert wait_for_probe(breaker, clock) == wait_s
        breaker.probed(None)
    clock.advance(2.1)
    breaker.failed("full", "no")
    assert wait_for_probe(breaker, clock) == 1.0


def test_jitter_shortens_a_wait_by_up_to_half(clock: ManualClock) -> None:
    waits = set()
    for seed in range(50):
        breaker = Breaker(clock, random.Random(seed), wait_s=1.0)
        breaker.failed("refused", "no")
        waits.add(wait_for_probe(breaker, clock))
    assert len(waits) > 40 and 0.5 <= min(waits) and max(waits) <= 1.0
