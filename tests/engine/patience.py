"""Where a test says how many tokens are cached: a busy machine must not make a lookup or a read too late to be used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.engine_child import Child

READS_S = 60.0


def wait_for_every_hit(child: Child) -> None:
    """The engine waits for answers of its manager, and for reads from disk, however fast it would compute instead."""
    assert child.engine is not None
    leader: Any = child.engine.leader_half._scheduler.side.leader
    leader.lookups._patience = SimpleNamespace(
        manager_slow=False,
        unanswered_too_long=lambda search, now_s: False,
        for_reads_s=lambda search, offset: READS_S,
    )
