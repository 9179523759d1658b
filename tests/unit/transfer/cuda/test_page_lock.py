"""Page locks of the arena: whole pages, pauses, and what becomes of a refusal."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable

import pytest
import torch

from kvbm import pages
from kvbm.clock import Clock, ManualClock
from kvbm.testing.kv_views import SLOTS
from kvbm.transfer.cuda import page_lock
from kvbm.transfer.cuda.pieces import SlotRows
from rigs.cuda_bench import check_loads, check_stores, new_bench, warnings
from rigs.cuda_model import PAGE, Model

PIECE_SLOTS = 2


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two slots: the arena here has slots of a page."""
    monkeypatch.setattr(page_lock, "PIECE_BYTES", PIECE_SLOTS * PAGE + 1)


class PausedLocks:
    """Page locks whose pauses are noted and take no time. `on_pause` is called in each."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        model: Model,
        row_bytes: int = PAGE,
        on_pause: Callable[[float], None] = lambda pause_s: None,
        clock: Clock = time.monotonic,
    ) -> None:
        memory = mmap.mmap(-1, SLOTS * row_bytes + pages.MEMORY_PAGE_BYTES)
        self.arena = torch.frombuffer(memory, dtype=torch.uint8)
        start = -self.arena.data_ptr() % pages.MEMORY_PAGE_BYTES
        self.slots = SlotRows(self.arena.data_ptr() + start, row_bytes)
        self.locks = page_lock.PageLocks(self.slots, SLOTS, model.driver, model.device, clock=clock)
        self.pauses: list[float] = []

        def pause(pause_s: float) -> bool:
            self.pauses.append(pause_s)
            on_pause(pause_s)
            return False

        monkeypatch.setattr(self.locks._closing, "wait", pause)
        self.locks.begin()
        self.locks.run()


def test_the_driver_is_left_to_others_for_as_long_as_a_lock_took(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clock = Model(), ManualClock(5.0)
    lock_pages = model.driver.lock_pages

    def slow(address: int, size: int) -> None:
        clock.advance(0.25)
        lock_pages(address, size)

    monkeypatch.setattr(model.driver, "lock_pages", slow)
    paused = PausedLocks(monkeypatch, model, clock=clock)
    assert paused.pauses == [0.25] * -(-SLOTS // PIECE_SLOTS)
    paused.locks.close()


@pytest.mark.parametrize("row_pages", [1, 4, 6, 16, 17])
def test_slots_that_share_a_page_are_locked_together(monkeypatch: pytest.MonkeyPatch, row_pages: int) -> None:
    """Slots of 4 KiB, and multiples of that, on a machine whose pages have 64 KiB."""
    monkeypatch.setattr(pages, "MEMORY_PAGE_BYTES", 16 * PAGE)
    model = Model()
    paused = PausedLocks(monkeypatch, model, row_pages * PAGE)
    assert (paused.locks.locked_slots, paused.locks.refusal) == (SLOTS, "")
    assert all(address % (16 * PAGE) == 0 for address in model.locked)
    for slot in range(SLOTS):  # no copy reaches from one piece into the next
        assert model.reached_as(paused.slots.address + slot * row_pages * PAGE, row_pages * PAGE) == "host"
    paused.locks.close()
    assert model.locked == {}


def test_a_refusal_for_want_of_memory_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    model.refuse_locks_from = 2

    def memory_is_freed(pause_s: float) -> None:
        if pause_s == page_lock.RETRY_S[1]:
            model.refuse_locks_from = None

    with caplog.at_level(logging.INFO, "kvbm"):
        paused = PausedLocks(monkeypatch, model, on_pause=memory_is_freed)
    assert paused.locks.locked_slots == SLOTS
    assert [pause_s for pause_s in paused.pauses if pause_s >= 10] == [*page_lock.RETRY_S[:2]]
    refused, locked = (record.getMessage() for record in caplog.records)
    assert refused.endswith("at most 5 more tries follow within 9 minutes")
    assert locked == f"all {SLOTS} slots of the host arena are page-locked now"
    paused.locks.close()


def test_refusals_for_want_of_memory_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    model.refuse_locks_from = 0
    paused = PausedLocks(monkeypatch, model)
    assert paused.pauses == [*page_lock.RETRY_S]
    assert model.lock_calls == len(page_lock.RETRY_S) + 1
    first, final = warnings(caplog)
    assert "more tries follow" in first
    assert "more tries follow" not in final
    paused.locks.close()


@pytest.mark.parametrize(
    ("refusal", "meaning"),
    [
        ((712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"), "another library of this process"),
        ((801, "CUDA_ERROR_NOT_SUPPORTED"), "as under WSL2 and on some virtual GPUs"),
        ((1, "CUDA_ERROR_INVALID_VALUE"), "and are slower"),
    ],
)
def test_other_refusals_are_final(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusal: tuple[int, str],
    meaning: str,
) -> None:
    model = Model()
    model.refuse_locks_from, model.refuse_locks_with = 0, refusal
    paused = PausedLocks(monkeypatch, model)
    assert (paused.pauses, model.lock_calls) == ([], 1)
    (line,) = warnings(caplog)
    assert meaning in line
    assert "tries" not in line
    paused.locks.close()


def test_nothing_is_locked_where_locked_memory_has_another_address_on_the_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Batches of copies to its host address are illegal accesses there."""
    model = Model()
    model.driver.host_pointers = False
    bench = new_bench(model).prepared()
    assert model.lock_calls == 0
    (line,) = warnings(caplog)
    assert "11 of 11 slots" in line
    assert "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0, as under WSL2" in line
    assert "go through a small buffer and are slower" in line
    check_stores(bench)
    check_loads(bench)
    bench.close()
