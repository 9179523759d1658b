"""A defect of ours in the scheduler's process costs the cache, never the engine or a request."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.engine_start import engine_start_s
from kvbm.step_plan import LoadPlan, StepPlan
from kvbm.vllm_integration.guard import GuardedScheduler
from kvbm.weights import changed_since

pytestmark = pytest.mark.quick


class BrokenSide:
    """A scheduler side that works until told to break."""

    def __init__(self) -> None:
        self.block_tokens = 32
        self.broken = False
        self.pins = 3
        self.loads: tuple[LoadPlan, ...] = ()

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("a defect")

    def reset(self) -> bool:
        return False

    def give_up_pins(self) -> bool:
        self.pins = 0
        return True

    def matched(self, request: Any, tokens: int) -> tuple[int | None, bool]:
        self._check()
        return 64, True

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        self._check()

    def step(self, output: Any) -> StepPlan:
        self._check()
        return StepPlan(loads=self.loads)


REQUEST = SimpleNamespace(request_id="r")
TABLE = SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],))


@pytest.mark.swallows("^RuntimeError: a defect$")
def test_what_was_promised_fails_at_the_ranks_and_nobody_waits_for_ever() -> None:
    side: Any = BrokenSide()
    guard = GuardedScheduler(side)
    assert guard.matched(REQUEST, 32) == (64, True)
    guard.allocated(REQUEST, TABLE, 64)
    side.broken = True
    (load,) = guard.step(None).loads
    assert (load.request, load.device_blocks, load.ready) == ("r", (8, 9), 0)
    assert load.epoch == -1, "no rank has that memory"
    assert side.pins == 0, "the engine would never get those blocks back"
    side.broken = False
    assert guard.matched(REQUEST, 0) == (0, False), "off for good"
    assert guard.step(None) == StepPlan()
    assert guard.reset() is True


@pytest.mark.swallows("^RuntimeError: a defect$")
def test_a_defect_in_the_allocation_itself_is_owed_too() -> None:
    side: Any = BrokenSide()
    guard = GuardedScheduler(side)
    side.broken = True
    guard.allocated(REQUEST, TABLE, 64)
    assert [load.request for load in guard.step(None).loads] == ["r"]
    assert guard.step(None).loads == ()


@pytest.mark.swallows("^RuntimeError: a defect$")
def test_a_group_with_fewer_blocks_than_the_prompt_fails_too() -> None:
    """A load of no block would be one that is done."""
    side: Any = BrokenSide()
    guard = GuardedScheduler(side)
    guard.matched(REQUEST, 256)
    guard.allocated(REQUEST, TABLE, 64)
    side.broken = True
    (load,) = guard.step(None).loads
    assert load.device_blocks == (0,)


def test_where_the_start_is_unknown_every_file_is_younger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> float:
        raise OSError("/proc/stat has no btime")

    monkeypatch.setattr("kvbm.engine_start.process_start_s", unknown)
    old = tmp_path / "model.safetensors"
    old.write_bytes(b"weights")
    os.utime(old, (1, 1))
    assert changed_since([tmp_path], engine_start_s()) == old
