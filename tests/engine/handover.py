"""Prefill and decode apart: the configuration of two engines that NIXL joins, and what a proxy asks of them.

The proxy's protocol is that of vLLM's own example: the prefill engine is asked for one token and answers where the
prompt's KV lies; that goes with the same request to the decode engine, which fetches it.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from engine.engine_child import KV_CONNECTOR, Child
from engine.engine_process import EngineProcess

TIMEOUT_S = 60.0
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    # By default four threads, which keep one another waiting on two cores. And who is slow shall not lose its lease of
    # the other's blocks, after which vLLM answers from whatever is in them.
    "kv_connector_extra_config": {"num_threads": 1, "kv_lease_duration": 600},
}

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

_names = itertools.count()


class Said(NamedTuple):
    """An answer, and where the KV of its prompt can be fetched."""

    tokens: list[int]
    where: dict[str, Any] | None


def both(connector: str) -> dict[str, Any]:
    """A cache and NIXL in one engine: the original's `PdConnector`, or vLLM's `MultiConnector`."""
    module = {"kv_connector_module_path": KV_CONNECTOR["kv_connector_module_path"]}
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        **(module if connector == "PdConnector" else {}),
        **RECOMPUTE,
        "kv_connector_extra_config": {"connectors": [KV_CONNECTOR, NIXL]},
    }


def prefill(engine: EngineProcess, tokens: Sequence[int]) -> dict[str, Any]:
    """Compute a prompt; where its KV lies."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    said: Said = engine.call(complete, list(tokens), 1, asked, timeout_s=TIMEOUT_S)
    assert said.where is not None and said.where["do_remote_prefill"]
    return said.where


def decode(
    engine: EngineProcess, tokens: Sequence[int], where: Mapping[str, Any], count: int = 12
) -> list[int]:
    """The answer to a prompt whose KV lies there."""
    said: Said = engine.call(complete, list(tokens), count, dict(where), timeout_s=TIMEOUT_S)
    return said.tokens


def abandon(engine: EngineProcess, tokens: Sequence[int], where: Mapping[str, Any]) -> None:
    """Abort the request for this prompt when its first step has asked for the KV that lies there."""
    engine.call(abort, list(tokens), dict(where), timeout_s=TIMEOUT_S)


def answered(prefiller: EngineProcess, decoder: EngineProcess, tokens: Sequence[int]) -> list[int]:
    """What a client behind the proxy gets."""
    return decode(decoder, tokens, prefill(prefiller, tokens))


def alone(engine: EngineProcess, tokens: Sequence[int]) -> list[int]:
    """What the engine answers when it computes all of it: a salt keeps it from finding anything."""
    said: Said = engine.call(
        complete, list(tokens), 12, None, salt=f"alone {next(_names)}", timeout_s=TIMEOUT_S
    )
    return said.tokens


def forget(engine: EngineProcess) -> None:
    """Drop the device's cache; the tiers below keep theirs."""
    engine.call(reset, timeout_s=TIMEOUT_S)


# ---- in the engine's process


def complete(
    child: Child, tokens: list[int], count: int, transfer: Mapping[str, Any] | None, salt: str = ""
) -> Said:
    """One request, to its end, and what it stored."""
    engine = child.engine
    assert engine is not None
    _add(child, tokens, count, transfer, salt)
    until_s = time.monotonic() + TIMEOUT_S - 5.0
    while time.monotonic() < until_s:
        for output in engine.core.step():
            if output.finished:
                engine.wait_for_stores()
                return Said(list(output.outputs[0].token_ids), output.kv_transfer_params)
        time.sleep(0.001)  # the other's blocks are under way
    raise TimeoutError("the request has no answer")


def abort(child: Child, tokens: list[int], where: Mapping[str, Any]) -> None:
    """One request that ends while its KV is under way."""
    engine = child.engine
    assert engine is not None
    name = _add(child, tokens, 12, where)
    assert not any(output.finished for output in engine.core.step())
    engine.core.abort_request([name])
    engine.wait_for_stores()
    assert not engine.core.has_unfinished_requests()


def _add(
    child: Child, tokens: list[int], count: int, transfer: Mapping[str, Any] | None, salt: str = ""
) -> str:
    from vllm import SamplingParams

    assert child.engine is not None
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if salt:
        prompt["cache_salt"] = salt
    extra = {"kv_transfer_params": dict(transfer)} if transfer is not None else None
    parameters = SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra
    )
    name = f"handed-{next(_names)}"
    child.engine.core.add_request(name, prompt, parameters)
    return name


def reset(child: Child) -> None:
    """vLLM's reset, once nobody uses a block: a prefill engine must first hear that its blocks were fetched."""
    assert child.engine is not None
    until_s = time.monotonic() + TIMEOUT_S - 5.0
    while not child.engine.core.reset_prefix_cache():
        assert time.monotonic() < until_s, "blocks stay in use"
        child.engine.core.step()
        time.sleep(0.01)
