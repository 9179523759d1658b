"""What the engine's arguments say of its ranks and blocks, and what cannot be served: the same in every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbm.weights import local_files

KIND = "trtllm"
_JOB_VARIABLES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "FLUX_JOB_ID")
"""What MPI launchers give all ranks of one job, and no other job, of a node."""

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""How many ranks a job has, where the launcher says it."""

_process = f"{os.getpid()}-{os.urandom(6).hex()}"
"""The name of this process, for engines of one rank: their leader and their rank are in one."""
_instances = {"leader": 0, "worker": 0}


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as one of its ranks sees it. `request_tokens` is the longest request, 0 where that is not known."""

    engine: str
    rank: int
    rank_count: int
    tensor_rank: int
    tensor_ranks: int
    stage: int
    stages: int
    block_tokens: int
    request_tokens: int
    model: str

    @property
    def request_blocks(self) -> int:
        """Blocks of the longest request."""
        return -(-self.request_tokens // self.block_tokens)


def facts_of(llm_args: Any, environment: Mapping[str, str], role: str) -> EngineFacts:
    """The facts; the engine's n-th leader of a process belongs to the n-th worker of each of its ranks' processes.

    Raises ValueError, in one line, where ranks in several processes have nothing in common that names them.
    """
    mapping = llm_args.parallel_config.to_mapping()
    rank_count = int(mapping.world_size)
    number, _instances[role] = _instances[role], _instances[role] + 1
    return EngineFacts(
        engine=f"{KIND}-{_job(rank_count, environment)}-{number}",
        rank=int(mapping.rank),
        rank_count=rank_count,
        tensor_rank=int(getattr(mapping, "tp_rank", 0)),
        tensor_ranks=int(getattr(mapping, "tp_size", 1)),
        stage=int(getattr(mapping, "pp_rank", 0)),
        stages=int(getattr(mapping, "pp_size", 1)),
        block_tokens=int(llm_args.kv_cache_config.tokens_per_block),
        request_tokens=int(getattr(llm_args, "max_seq_len", None) or 0),
        model=str(llm_args.model),
    )


def _job(rank_count: int, environment: Mapping[str, str]) -> str:
    if rank_count == 1:
        return _process
    found = next((name for name in _JOB_VARIABLES if environment.get(name)), None)
    if found is None:
        raise ValueError(
            f"{rank_count} ranks have no name in common: their MPI launcher sets none of {', '.join(_JOB_VARIABLES)}"
        )
    for name in _SIZE_VARIABLES:
        if environment.get(name, "").isdigit() and int(environment[name]) != rank_count:
            raise ValueError(
                f"{rank_count} ranks in an MPI job of {environment[name]} ({name}): engines of one job have no names "
                "of their own; accepted is a job for each engine"
            )
    return environment[found]


def unsupported_reason(llm_args: Any) -> str:
    """Why KVBM stays off for this engine, in one line; empty when it can serve."""
    mapping, cache = llm_args.parallel_config.to_mapping(), llm_args.kv_cache_config
    if getattr(mapping, "enable_attention_dp", False) or getattr(llm_args, "enable_attention_dp", False):
        return "enable_attention_dp: each rank has requests of its own; accepted is tensor parallelism without it"
    if int(getattr(mapping, "cp_size", 1) or 1) > 1:
        return f"context_parallel_size={mapping.cp_size}; accepted is 1"
    node_ranks = int(getattr(mapping, "gpus_per_node", 0) or mapping.world_size)
    if int(mapping.world_size) > node_ranks:
        return f"{mapping.world_size} ranks on nodes of {node_ranks}: ranks on other nodes cannot share host memory"
    if int(getattr(cache, "host_cache_size", None) or 0) > 0:
        # A block that the engine has moved to host memory and back lies elsewhere than its number says.
        return (
            f"kv_cache_config.host_cache_size={cache.host_cache_size}: block numbers do not name device memory then; "
            "accepted is 0, and KVBM is that host cache"
        )
    windows = getattr(cache, "max_attention_window", None)
    if windows:
        return f"kv_cache_config.max_attention_window={list(windows)}; accepted is full attention"
    config = model_config(llm_args)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return (
            f"the model attends to a window of {config['sliding_window']} tokens; accepted is full attention"
        )
    return ""


def notices(llm_args: Any) -> list[str]:
    """Warnings about settings with which KVBM works less than it could."""
    lines = []
    if getattr(llm_args.kv_cache_config, "enable_partial_reuse", False):
        lines.append(
            "kv_cache_config.enable_partial_reuse is on: a prompt whose match on the device ends inside a block gets "
            "no hit from KVBM; set it to false"
        )
    return lines


def model_location(llm_args: Any) -> Path | None:
    """The model's files on this machine; None where there are none."""
    name = str(getattr(llm_args, "_hf_model_dir", None) or llm_args.model)
    revision, downloads = getattr(llm_args, "revision", None), None
    return local_files(name, revision, downloads)


def model_config(llm_args: Any) -> dict[str, Any]:
    """The model's `config.json`; empty where it cannot be read."""
    location = model_location(llm_args)
    if location is None:
        return {}
    try:
        config = json.loads((location / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
