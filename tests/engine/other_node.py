"""The other node of an engine over two: its ranks alone, in a process whose environment is that node's. And its end.

On one machine two processes stand for two nodes, each with a manager of its own. Called as `function(child, …)`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from engine.engine_child import Answers, Child, Engine, clean_up, prepare
from engine.workload import Request

_executors: list[Any] = []


def serve_ranks(child: Child, options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Start the ranks of this node, as `vllm serve --headless` does. Returns when the engine has them."""
    assert child.engine is None
    arguments = prepare(options, environment)
    from vllm import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**arguments).create_engine_config(headless=True)
    _executors.append(MultiprocExecutor(config, monitor_workers=False))


def end_ranks(child: Child) -> None:
    """End them; the engine has gone, or goes."""
    while _executors:
        _executors.pop().shutdown()
    clean_up()


def run_and_kill_at(
    child: Child, requests: Sequence[Request], finished_count: int, pid: int, timeout_s: float = 90.0
) -> Answers:
    """Answer the requests, and kill -9 that process when so many are answered and, if possible, a load is open."""
    assert child.engine is not None
    killed = list[int]()

    def kill(engine: Engine, finished: int) -> None:
        loading = engine.leader_half._scheduler.side.leader.lookups.loading
        if not killed and finished >= finished_count and (loading or finished >= finished_count + 10):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    answers = child.engine.run(requests, timeout_s=timeout_s, between=kill)
    assert killed
    return answers
