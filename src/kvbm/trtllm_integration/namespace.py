"""The facts that must agree before two TensorRT-LLM engines share bytes.

Each rank finds them out by itself, as collectives are not to be called from a connector: they must be the same on all
ranks, and the manager refuses a rank that differs. The weights are named by the content of the model's files.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from kvbm import engine_start
from kvbm.errors import KvbmError
from kvbm.layout import Namespace
from kvbm.trtllm_integration.engine_facts import KIND, EngineFacts, model_location
from kvbm.weights import changed_since, weights_digest

log = logging.getLogger("kvbm.trtllm")

_OPTIONS = (
    "dtype",
    "attn_backend",
    "quant_config",
    "speculative_config",
    "sparse_attention_config",
    "lora_config",
    "moe_config",
    "model_kwargs",
    "checkpoint_format",
    "load_format",
    "enable_chunked_prefill",
    "allreduce_strategy",
    "torch_dtype",
)
"""Arguments that shape the weights in memory, or what is computed with them."""


def engine_namespace(
    llm_args: Any, facts: EngineFacts, device_layout: str, replicated: bool, release: str, runtime_dir: str
) -> Namespace:
    """The namespace of an engine. `device_layout` describes a block on this rank's device, `replicated` says that all
    tensor-parallel ranks hold the same bytes. Raises KvbmError, in one line, where no name can be given."""
    weights, ephemeral = _weights(llm_args, facts, runtime_dir)
    fields = [
        ("engine", KIND),
        ("weights", weights),
        ("release", release),
        ("kv_dtype", str(getattr(llm_args.kv_cache_config, "dtype", "auto"))),
        ("block_tokens", str(facts.block_tokens)),
        ("tensor_parallel", str(facts.tensor_ranks)),
        ("pipeline_parallel", str(facts.stages)),
        ("replicated", str(replicated)),
        ("device_layout", _digest(device_layout)),
    ]
    fields += [(name, _plain(getattr(llm_args, name, None))) for name in _OPTIONS]
    return Namespace(model=facts.model, fields=tuple(fields), ephemeral=ephemeral)


def _weights(llm_args: Any, facts: EngineFacts, runtime_dir: str) -> tuple[str, bool]:
    """The digest of the weights' files; or a name that only this engine has, and True."""
    location = model_location(llm_args)
    dummy = str(getattr(llm_args, "load_format", "auto")).lower().endswith("dummy")
    digest, why = None, "are in no local file that could be digested"
    if dummy:
        why = "are made up (load_format)"
    elif location is not None:
        digest = weights_digest([location], Path(runtime_dir) / "weights.json")
    young = changed_since([location], engine_start.engine_start_s()) if digest and location else None
    if digest is not None and young is None:
        return digest, False
    if young is not None:
        why = f"may have changed while they were loaded ({young})"
    if facts.rank_count > 1:
        raise KvbmError(
            f"weights of {facts.model} {why}, so that its {facts.rank_count} ranks have no name for them"
        )
    log.warning("weights of %s %s: its blocks are kept for this engine only", facts.model, why)
    return f"unknown-{facts.engine}", True


def _plain(value: Any) -> str:
    """An argument as text that is the same in every process and for equal arguments."""
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    return f"{type(value).__name__}:{_digest(json.dumps(_known(value), sort_keys=True))}"


def _known(value: Any) -> Any:
    """What JSON can carry of an argument. Other objects count by type: their text may name an address."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return [type(value).__name__, str(value.value)]
    if isinstance(value, Mapping):
        return {str(name): _known(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_known(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_known(each), sort_keys=True) for each in value)
    dump = getattr(value, "model_dump", None)
    fields = dump() if dump is not None else getattr(value, "__dict__", {})
    return [type(value).__name__, {str(name): _known(each) for name, each in fields.items()}]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
