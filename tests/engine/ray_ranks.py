"""Engines whose ranks are Ray's actors, inside the engine's process. Called as `function(child, …)`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.engine_child import Child, clean_up, prepare
from engine.workload import Request


def where_ranks_are(child: Child) -> list[dict[str, str]]:
    """What each rank finds of KVBM in its environment."""
    assert child.engine is not None
    found: list[dict[str, str]] = child.engine.llm.collective_rpc(_own_variables)
    return found


def _own_variables(worker: Any) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("DYN_")}


def leave(child: Child) -> None:
    """End the engine and this process's membership, with which Ray gives its devices back."""
    child.stop()
    import ray

    ray.shutdown()


def run_and_kill_a_rank(
    child: Child,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    requests: Sequence[Request],
    timeout_s: float,
) -> str:
    """An engine as users have it, whose core is a process of its own: kill -9 its rank 1 when three requests are
    answered. The name of the error that the others end with.

    Nothing reaches the core from here, so the requests that name a parent are left out.
    """
    assert child.engine is None
    # A function goes to the ranks, which tells their processes' numbers.
    as_users = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    arguments = prepare(options, {**environment, **as_users})
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    core = llm.llm_engine
    pids = llm.collective_rpc(_pid)
    for request in requests:
        if not request.parent:
            params = SamplingParams(
                temperature=0.0, max_tokens=request.output_count, ignore_eos=True, detokenize=False
            )
            core.add_request(request.name, {"prompt_token_ids": list(request.tokens)}, params)
    answered, error = 0, ""
    began_s = time.monotonic()
    while not error and core.has_unfinished_requests():
        assert time.monotonic() - began_s < timeout_s, "the engine neither answers nor ends"
        try:
            answered += sum(output.finished for output in core.step())
        except Exception as ended:
            error = type(ended).__name__
        if answered >= 3 and pids:
            os.kill(pids[1], signal.SIGKILL)
            pids.clear()
    core.engine_core.shutdown()
    del llm, core
    clean_up()
    return error


def _pid(worker: Any) -> int:
    return os.getpid()
