"""An engine whose device blocks are all in use or pinned by stores that have only just been planned."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from engine.engine_child import Answers, Child, Engine
from engine.workload import Request

FULL_STEPS = 20


def run_beside_pins(child: Child, requests: Sequence[Request], asks: bool) -> tuple[Answers, int]:
    """Answer the requests while no store ends, until vLLM has had no free block for some steps or has preempted a
    request; the number of these steps as well. Pins stay young. Unless it `asks`, vLLM is not told of them."""
    engine = child.engine
    assert engine is not None
    side, scheduler = engine.worker_half._worker, engine.scheduler
    stores = engine.leader_half._scheduler.side.leader.stores
    side.worker._copies_beside = True
    now_s = stores._clock()
    stores._clock = lambda: now_s
    copier, preempt = side.mover.mark().mapping.copier, scheduler._preempt_request
    begin_store, full_steps = copier.begin_store, 0
    gate = threading.Event()

    def held(pairs: Any, after: Any = None) -> Any:
        assert gate.wait(60.0), "the stores were let go by nothing"
        return begin_store(pairs, after)

    def noted(*arguments: Any, **more: Any) -> Any:
        gate.set()  # its blocks are overwritten once they are stored: the engine waits for that
        return preempt(*arguments, **more)

    def count(engine: Engine, finished: int) -> None:
        nonlocal full_steps
        full_steps += not (gate.is_set() or scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        if full_steps == FULL_STEPS:
            gate.set()

    copier.begin_store, scheduler._preempt_request = held, noted
    if not asks:
        engine.leader_half.has_pending_block_frees = lambda: False
    try:
        return engine.run(requests, between=count), full_steps
    finally:
        gate.set()
