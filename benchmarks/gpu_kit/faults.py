"""Faults in a running engine's copies: loads that fail, and KV that is wrong behind everybody's back.

They reach into KVBM's worker, in whose process they run; nothing else of the kit knows names inside of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 60.0
POLL_S = 0.02


class _Copier:
    """A copier that calls `before` with the (device block, slot) pairs of each load."""

    def __init__(self, inner: Any, before: Callable[[Any], None]) -> None:
        self._inner = inner
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_load(self, pairs: Any, after: Any, layer: Any = None) -> Any:
        self._before(pairs)
        return self._inner.begin_load(pairs, after, layer)


def wait_until_ready(llm: Any) -> None:
    """Until KVBM's leader has heard from its manager that all ranks are there. Raises TimeoutError."""
    leader = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.side.leader
    until_s = time.monotonic() + WAIT_S
    while not leader.ready:
        leader.receive()
        if time.monotonic() > until_s:
            raise TimeoutError(f"KVBM has no manager after {WAIT_S:.0f} s")
        time.sleep(POLL_S)


def fail_loads(every: int) -> list[int]:
    """Every n-th copy to the device raises; returns a list that grows by one each time."""
    struck: list[int] = []
    count = 0

    def strike(_pairs: Any) -> None:
        nonlocal count
        count += 1
        if count % every == 0:
            struck.append(count)
            raise RuntimeError("injected: this copy fails")

    _wrap(strike)
    return struck


def damage_loads() -> list[int]:
    """What is loaded is zeroed in host memory before; returns a list with the blocks of each load."""
    damaged: list[int] = []

    def damage(pairs: Any) -> None:
        mapping = _mover().mark().mapping
        size = mapping.slot_bytes
        for _, slot in pairs:
            mapping.region[slot * size : (slot + 1) * size] = bytes(size)
        damaged.append(len(pairs))

    _wrap(damage)
    return damaged


def _mover() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker.mover


def _wrap(before: Callable[[Any], None]) -> None:
    mapping = _mover().mark().mapping
    mapping.copier = _Copier(mapping.copier, before)
