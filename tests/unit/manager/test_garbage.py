"""Reference cycles are collected when the manager is idle, and only where it never is between two turns."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvbm.clock import ManualClock
from kvbm.manager.garbage import COLLECT_AT_THE_LATEST_S, COLLECT_EVERY_S, collected_when_idle


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_a_collection_waits_until_it_is_due_and_nobody_waits() -> None:
    clock = ManualClock(5.0)
    with collected_when_idle(clock) as turn_ended:
        assert not gc.isenabled()
        left = weakref.ref(Ring())
        turn_ended(True)
        assert left() is not None, "not due"
        clock.advance(COLLECT_EVERY_S)
        turn_ended(False)
        assert left() is not None, "there is work"
        turn_ended(True)
        assert left() is None
    assert gc.isenabled()


def test_a_manager_without_a_pause_collects_all_the_same() -> None:
    clock = ManualClock(5.0)
    with collected_when_idle(clock) as turn_ended:
        left = weakref.ref(Ring())
        clock.advance(COLLECT_AT_THE_LATEST_S - 1.0)
        turn_ended(False)
        assert left() is not None
        clock.advance(1.0)
        turn_ended(False)
        assert left() is None


def test_python_collects_by_itself_again_after_a_failure() -> None:
    with pytest.raises(RuntimeError), collected_when_idle(ManualClock()):
        raise RuntimeError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
