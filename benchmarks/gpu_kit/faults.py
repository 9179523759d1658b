"""Faults in a running engine's copies: loads that fail, and loads of damaged KV.

They run in the process of KVBM's worker and use its private names; no other module of the kit does.
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
    """Wait until all ranks are connected to KVBM's manager. Raises TimeoutError."""
    leader = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.side.leader
    until_s = time.monotonic() + WAIT_S
    while not leader.ready:
        leader.receive()
        if time.monotonic() > until_s:
            raise TimeoutError(f"KVBM has no manager after {WAIT_S:.0f} s")
        time.sleep(POLL_S)


def fail_loads(every: int) -> list[int]:
    """Make every n-th copy to the device raise; returns a list that grows by one each time."""
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
    """Zero blocks in host memory before they are loaded; returns a list with the blocks of each load."""
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
