"""The ranks of an engine, which compute parts of its layers, or some of them: what they tell one another at the start.

Each rank has its shard of every block. The shards of a block have one size in the tiers, that of the rank with the
most layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvbm.errors import KvbmError


def gather(parallel: Any, part: bytes) -> list[bytes]:
    """The parts of all ranks, in their order: stage by stage. Every rank calls this at the same point.

    Raises KvbmError in one line where a rank cannot be heard.
    """
    gathered = [part]
    if int(parallel.world_size) == 1:
        return gathered
    from vllm.distributed import get_pp_group, get_tp_group

    groups: tuple[tuple[int, Callable[[], Any]], ...] = (
        (int(parallel.tensor_parallel_size), get_tp_group),
        (int(parallel.pipeline_parallel_size), get_pp_group),
    )
    for size, group in groups:
        if size == 1:
            continue
        everyone: list[list[bytes]] = [[]] * size
        try:
            torch.distributed.all_gather_object(everyone, gathered, group=group().cpu_group)
        except RuntimeError as error:
            text = " ".join(str(error).split())
            raise KvbmError(f"the ranks' parts could not be gathered: {text}") from None
        gathered = [each for parts in everyone for each in parts]
    return gathered


def largest_shard(parallel: Any, shard_bytes: int) -> int:
    """The bytes of a block in the rank that has most of it; stages of a pipeline may have more layers than others."""
    if int(parallel.world_size) == 1 or int(parallel.pipeline_parallel_size) == 1:
        return shard_bytes
    return max(int.from_bytes(size, "big") for size in gather(parallel, shard_bytes.to_bytes(8, "big")))


def context_parallel(vllm_config: Any) -> int:
    """How many ranks share the tokens of a block."""
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))


def block_tokens(vllm_config: Any, spec: Any) -> int:
    """The tokens of a block of all ranks: where they share its tokens, the specification has those of one rank."""
    sharing = context_parallel(vllm_config) if getattr(spec, "dcp_sharded", True) else 1
    return int(spec.block_size) * sharing
