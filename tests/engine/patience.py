"""Where a test says how many tokens are cached: a busy machine must not make a lookup, a read or a store too late."""

from __future__ import annotations

import time
from typing import Any

from engine.engine_child import Child
from kvbm.leader.patience import Patience
from kvbm.leader.search import Search

READS_S = 60.0
SLOTS_S = 10.0


class EndlessPatience(Patience):
    """No lookup is too late, and every read from disk is waited for."""

    is_manager_silent = False

    def unanswered_too_long(self, search: Search, now_s: float) -> bool:
        return False

    def for_reads_s(self, search: Search, offset: int) -> float:
        return READS_S


def wait_for_every_hit(child: Child) -> None:
    """The engine waits for answers of its manager, and for reads from disk, however fast it would compute instead."""
    leader = _leader(child)
    leader.lookups.patience = EndlessPatience(leader._link, leader.cost)


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
