"""The KV that an engine computed for given tokens, byte by byte, and its namespace. For `test_identity`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.engine_child import Child, Engine
from engine.workload import Request


def fields(child: Child) -> dict[str, str]:
    """The namespace that the engine's rank introduced itself with; `fingerprint` in hex is among its fields."""
    namespace = _engine(child).worker_half._worker.mover._hello.namespace
    return {**dict(namespace.fields), "fingerprint": namespace.fingerprint.hex()}


def kv_of(child: Child, tokens: Sequence[int], beside: Sequence[Request] = (), threads: int = 1) -> Any:
    """K and V of the prompt's complete blocks in every layer, as floats; `beside` are computed in the same steps."""
    from vllm import SamplingParams

    engine = _engine(child)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        engine.core.add_request("probe", {"prompt_token_ids": list(tokens)}, one)
        (request,) = engine.scheduler.requests.values()
        for other in beside:
            engine.core.add_request(other.name, {"prompt_token_ids": list(other.tokens)}, one)
        while engine.core.has_unfinished_requests():
            engine.core.step()
    finally:
        torch.set_num_threads(threads_before)
    pool = engine.scheduler.kv_cache_manager.block_pool
    blocks = [pool.get_cached_block(block_hash, [0])[0].block_id for block_hash in request.block_hashes]
    caches = engine.core.model_executor.driver_worker.worker.model_runner.kv_caches
    return np.stack([_as_floats(cache[blocks]) for cache in caches])


def _as_floats(blocks: torch.Tensor) -> Any:
    """Bytes of a quantized cache count as they are: other scales are other bytes."""
    return blocks.contiguous().float().numpy()


def difference(one: Any, other: Any) -> float:
    """The largest difference of two engines' KV; infinite where they do not even have one form."""
    if one.shape != other.shape:
        return float("inf")
    return float(np.max(np.abs(one - other)))


def engine_arguments(child: Child) -> set[str]:
    """All arguments of the engine of the vLLM in this process."""
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    return {field.name for field in dataclasses.fields(EngineArgs)}


def _engine(child: Child) -> Engine:
    assert child.engine is not None, "no engine was started"
    return child.engine
