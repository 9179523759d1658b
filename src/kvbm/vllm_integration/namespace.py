"""What must agree before two vLLM engines share bytes."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import torch

from kvbm.layout import Namespace
from kvbm.weights import changed_since, process_start_s, weight_files, weights_digest

log = logging.getLogger("kvbm.vllm")


def engine_namespace(
    vllm_config: Any, kv_cache_config: Any, device_layout: str, memo_path: Path
) -> Namespace:
    """The namespace of a worker. `device_layout` describes what the bytes of a block mean on the device."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    weights = _weights(vllm_config, memo_path)
    fields = (
        ("weights", weights),
        ("config", _digest(model.hf_config.to_json_string(use_diff=False))),
        ("dtype", str(model.dtype)),
        ("quantization", str(model.quantization)),
        ("kv_dtype", str(cache.cache_dtype)),
        ("block_tokens", str(spec.block_size)),
        ("packing", cpu_packing(model, spec) if device_layout.startswith("cpu") or _on_cpu() else "none"),
        ("device_layout", _digest(device_layout)),
        ("tensor_parallel", str(parallel.tensor_parallel_size)),
    )
    name = str(model.served_model_name or model.model)
    return Namespace(model=name, fields=fields, ephemeral=weights.startswith("unknown-"))


def cpu_packing(model: Any, spec: Any) -> str:
    """How this CPU's attention packs a block: blocks of one instruction set are garbage to another."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    head_size = getattr(spec, "head_size", None)
    return str(_get_attn_isa(model.dtype, spec.block_size, head_size))


class Adapters:
    """What adapters add to the keys of their requests: their content, which vLLM's hash of name and path leaves out.

    An adapter whose files changed while the engine runs may or may not have been loaded again, and one that is in no
    local file cannot be told from another: requests that use such an adapter neither look up nor store. One that is
    younger than the engine may have changed between its loading and our first look: its keys mean something to this
    engine alone.
    """

    def __init__(self, memo_path: Path) -> None:
        self._memo_path = memo_path
        self._seen: dict[str, tuple[tuple[object, ...], bytes]] = {}
        self._unkept: set[str] = set()
        self._only_here = os.urandom(16)

    def extras(self, lora_path: str) -> bytes | None:
        """The extras of a request that uses the adapter at this path; None when its blocks must not be kept."""
        if lora_path in self._unkept:
            return None
        try:
            identity = _identity(Path(lora_path))
            if lora_path not in self._seen:
                digest = weights_digest([Path(lora_path)], self._memo_path)
                if digest is None:
                    self._keep_no_more(lora_path, "is in no local file that could be digested")
                    return None
                young = changed_since([Path(lora_path)], engine_start_s()) is not None
                self._seen[lora_path] = identity, digest.encode() + (self._only_here if young else b"")
        except OSError as error:
            self._keep_no_more(lora_path, f"cannot be read ({error})")
            return None
        first, extras = self._seen[lora_path]
        if identity != first:
            self._keep_no_more(lora_path, "changed while the engine runs")
            return None
        return extras

    def _keep_no_more(self, lora_path: str, why: str) -> None:
        self._unkept.add(lora_path)
        log.warning("adapter %s %s: from now on its blocks are not kept", lora_path, why)


def engine_start_s() -> float:
    """No weights were loaded before this moment, in seconds of the system's clock; 0 where that is not known."""
    try:
        return process_start_s()
    except OSError:
        return 0.0


def _identity(location: Path) -> tuple[object, ...]:
    """What changes when any of an adapter's files does."""
    return tuple(
        (path.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path in weight_files(location)
        for status in (path.stat(),)
    )


def _weights(vllm_config: Any, memo_path: Path) -> str:
    """The digest of all weights that shape KV: the model's and, with one, the draft model's."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) in ("dummy", "LoadFormat.DUMMY"):
        return f"dummy-seed-{model.seed}"
    models = [(model.model, model.revision)]
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        models.append((draft.model, draft.revision))
    locations = [_location(name, revision) for name, revision in models]
    known = [location for location in locations if location is not None]
    digest = weights_digest(known, memo_path) if len(known) == len(locations) else None
    young = changed_since(known, engine_start_s()) if digest is not None else None
    if digest is None or young is not None:
        log.warning(
            "weights of %s %s: its blocks are kept for this engine only",
            ", ".join(name for name, _ in models),
            f"may have changed while they were loaded ({young})"
            if young is not None
            else "are in no local file that could be digested",
        )
        # All ranks of this start have the instance in common; the engine's name may be a fixed one of the user's.
        return f"unknown-{vllm_config.kv_transfer_config.engine_id}-{vllm_config.instance_id}"
    return digest


def _location(name: str, revision: str | None) -> Path | None:
    """The local files of a model given by path or by hub name."""
    if Path(name).exists():
        return Path(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError):
        return None
    return Path(config).parent if isinstance(config, str) else None


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
