"""Whole graphs and steps queued ahead of the device, in V2's order of calls: what is stored and loaded is right.

Each of the orders that this rests on is shown to matter: without it some interleaving goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.v2_double import Runner, Scheduler

SEEDS = range(12)
STEPS = 40


def nothing_of_ours(device: Any, new_blocks: list[int]) -> None:
    """`update_requests` of the models that are served: no block is zeroed, none is copied."""


def zeroes(device: Any, new_blocks: list[int]) -> None:
    """`update_requests` where `needs_kv_cache_zeroing`."""
    device.write(new_blocks, 0)


def right(seed: int, update_requests: Callable[[Any, list[int]], None], released: bool = True) -> bool:
    runner, scheduler = Runner(seed, update_requests), Scheduler(seed, released)
    for _ in range(STEPS):
        scheduler.step(runner)
    runner.close()
    assert len(scheduler.stored) > 5
    assert len(scheduler.reads) > 5
    return scheduler.right(runner)


def test_steps_queued_ahead_of_the_device() -> None:
    assert all(right(seed, nothing_of_ours) for seed in SEEDS)


def test_blocks_that_are_zeroed_first_would_be_stored_as_zeroes() -> None:
    """Why blocks of such models are pinned until they are copied: on V2 it comes before `handle_preemptions`."""
    assert not all(right(seed, zeroes) for seed in SEEDS)


def test_blocks_that_no_step_releases_would_be_overwritten_before_they_are_copied() -> None:
    assert not all(right(seed, nothing_of_ours, released=False) for seed in SEEDS)
