"""Where a test says how many tokens are cached: a busy machine must not make a lookup, a read or a store too late."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from engine.engine_child import Child

READS_S = 60.0
SLOTS_S = 10.0


def wait_for_every_hit(child: Child) -> None:
    """The engine waits for answers of its manager, and for reads from disk, however fast it would compute instead."""
    leader = _leader(child)
    leader.lookups.patience = SimpleNamespace(
        is_manager_silent=False,
        record_answer=lambda: None,
        unanswered_too_long=lambda search, now_s: False,
        for_reads_s=lambda search, offset: READS_S,
    )


def wait_for_every_store(child: Child) -> None:
    """The engine waits for the slots of blocks that it would otherwise give up with their request."""
    leader = _leader(child)
    wait_a_little = leader._wait_a_little

    def wait(seconds: float, *awaited: Any) -> None:
        deadline = time.monotonic() + SLOTS_S
        wait_a_little(seconds, *awaited)
        while leader.stores.unanswered and time.monotonic() < deadline:
            wait_a_little(seconds, *awaited)

    leader._wait_a_little = wait


def _leader(child: Child) -> Any:
    assert child.engine is not None
    assert child.engine.leader is not None, "the engine runs without KVBM"
    return child.engine.leader
