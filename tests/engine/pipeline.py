"""Pipeline parallel on a CPU, inside the engine's process. Called as `function(child, …)`."""

from __future__ import annotations

from typing import Any

from engine.engine_child import Child


def make_room_between_stages(child: Child) -> None:
    """vLLM makes the tensors that a stage receives in while it profiles the model, which a CPU leaves out where nothing
    is compiled. After the engine's start, before its first step."""
    assert child.engine is not None
    child.engine.llm.collective_rpc(_make_room)


def _make_room(worker: Any) -> None:
    from vllm.distributed import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def shard_bytes(child: Child) -> list[int]:
    """The bytes of a block that each rank copies."""
    assert child.engine is not None
    sizes: list[int] = child.engine.llm.collective_rpc(_shard_bytes)
    return sizes


def _shard_bytes(worker: Any) -> int:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return int(get_kv_transfer_group()._worker.mover.mark().mapping.copier._cache.shard_bytes)
