"""Which of SGLang's device pools a linker moves: SGLang assembles them for hybrid models, and not for plain ones."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

_PLAIN = {MHATokenToKVPool, MLATokenToKVPool}
"""Pools whose layers are tensors of rows, a row a token, and nothing beside. Classes that extend them may hold more."""


def pool_group(params: Any, components: Any) -> DevicePoolGroup:
    """The pools of this rank. Raises ValueError in one line for pools that a linker cannot move."""
    cache = params.token_to_kv_pool_allocator.get_kvcache()
    drafts = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    if set(components) != {ComponentType.FULL} or type(cache) not in _PLAIN:
        return resolve_hybrid_device_pool_group(
            kvcache=cache, page_size=params.page_size, params=params, components=components
        )
    if drafts:
        raise ValueError("KVBM's linker does not keep the KV of a draft model: use its HiCache storage")
    scaled = [
        name for name in ("k_scale_buffer", "native_k_scale_buffer") if getattr(cache, name, None) is not None
    ]
    if scaled:
        raise ValueError(f"KVBM's linker does not keep a KV cache with {scaled[0]}: use its HiCache storage")
    replicated = type(cache) is MLATokenToKVPool
    layers = range(int(cache.layer_num))
    groups = [cache.kv_buffer] if replicated else [cache.k_buffer, cache.v_buffer]
    entry = DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=cache,
        components=groups,
        layer_mapping={layer: layer for layer in layers},
        page_size=params.page_size,
        rows_are_pages=False,
    )
    return DevicePoolGroup([entry], len(layers), params.page_size, rank_replicated=replicated)
