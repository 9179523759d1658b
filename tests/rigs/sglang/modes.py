"""The arguments of a small SGLang engine, by where it keeps KV that its device pool dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE_TOKENS = 16
DEVICE_TOKENS = 2048
STORAGE = {
    "backend_name": "kvbm",
    "module_path": "kvbm.sglang_integration.storage",
    "class_name": "KvbmStorage",
}
LINKER = {"linker": "KvbmLinker", "linker_module_path": "kvbm.sglang_integration.linker"}
PREFETCH_FROM_TOKENS = 32

Arguments = dict[str, Any]


def plain(model: Path, **more: Any) -> Arguments:
    """An engine with its device pool alone."""
    return {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.05,
        "max_total_tokens": DEVICE_TOKENS,
        "page_size": PAGE_TOKENS,
        "random_seed": 1,
        "log_level": "info",
        **more,
    }


def hicache(model: Path, **more: Any) -> Arguments:
    """With SGLang's own host pool."""
    pool = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
    }
    return plain(model, **pool | more)


def file(model: Path, **more: Any) -> Arguments:
    """With SGLang's own files below its host pool; `SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR` says where."""
    extra = json.dumps({"prefetch_threshold": PREFETCH_FROM_TOKENS})
    return hicache(
        model,
        hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=extra,
        **more,
    )


def storage(model: Path, v1: bool = True, extra: dict[str, Any] | None = None, **more: Any) -> Arguments:
    """With ours below its host pool, by the zero-copy calls (`v1`) or the generic ones."""
    words = {**STORAGE, "prefetch_threshold": PREFETCH_FROM_TOKENS, **(extra or {})}
    return hicache(
        model,
        hicache_storage_backend="dynamic",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps({**words, "interface_v1": 1} if v1 else words),
        **more,
    )


def linker(model: Path, extra: dict[str, Any] | None = None, **more: Any) -> Arguments:
    """With ours, straight below the device pool."""
    return plain(
        model,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={**LINKER, "linker_extra_config": extra or {}},
        **more,
    )
