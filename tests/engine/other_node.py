"""The other node of an engine over two: its ranks alone, in a process whose environment is that node's.

On one machine two processes stand for two nodes, each with a manager of its own. Called as `function(child, …)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.engine_child import Child, clean_up, prepare

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
