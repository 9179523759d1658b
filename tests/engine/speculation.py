"""The work of tests of speculative decoding inside the engine's process. Each is called as `function(child, …)`."""

from __future__ import annotations

from typing import Any

from engine import reach
from engine.engine_child import Child

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def let_vllm_pass_by_llvmlite(child: Child) -> None:
    """A CPU's vLLM looks at the `__dict__` of all that modules hold, and fails at llvmlite's library, which claims to
    have a function of any name. It is there once numba is, which n-gram guessing needs."""
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}


def draft_layers(child: Child) -> list[str]:
    """The layers with KV that are not the target's, in the order of the groups."""
    assert child.engine is not None
    target = child.engine.core.vllm_config.model_config.hf_config.num_hidden_layers
    own = {f"model.layers.{index}.self_attn.attn" for index in range(target)}
    groups = child.engine.scheduler.kv_cache_config.kv_cache_groups
    return [name for group in groups for name in group.layer_names if name not in own]


def draft_groups(child: Child) -> list[str]:
    """The specifications of the groups that hold a draft's layers."""
    assert child.engine is not None
    drafts = set(draft_layers(child))
    groups = child.engine.scheduler.kv_cache_config.kv_cache_groups
    return [type(group.kv_cache_spec).__name__ for group in groups if drafts & set(group.layer_names)]


def accepted(child: Child) -> float:
    """How many guesses were right, since the engine's start."""
    return reach.engine_metrics(child)[ACCEPTED]


def spoil_draft_layers(child: Child) -> None:
    """In all that is loaded from now on the draft's layers are empty."""
    assert child.engine is not None
    context = child.engine.core.vllm_config.compilation_config.static_forward_context
    caches = [context[name].kv_cache for name in draft_layers(child)]

    def spoil(pairs: Any, layer: Any) -> None:
        for cache in caches:
            for block, _ in pairs:
                cache[block].zero_()

    reach.after_loads(child, spoil)
