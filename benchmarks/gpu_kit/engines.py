"""How the engines whose answers are compared are set up, on a card and in a rehearsal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.engine import CONNECTOR

BLOCK_TOKENS = 32
MLA_BLOCK_TOKENS = 64
"""FlashMLA knows no other."""
MODEL_TOKENS_MAX = 768
DEVICE_BLOCKS = 48
"""Of 32 tokens: twice a request of the longest kind, so blocks are evicted all the time."""
ROOMY_TIMES = 16
HOST_BLOCKS = 800
TIGHT_HOST_BLOCKS = 30
SHAPE_LAYERS = 4


def outputs_environment(options: dict[str, Any], request: dict[str, Any]) -> dict[str, str]:
    """What vLLM and KVBM read at their start, for a case that compares answers."""
    values = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "INFO"}
    if request["rehearse"]:
        values |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    elif options["how"] == "graphs":
        values["VLLM_BATCH_INVARIANT"] = "1"
    if not options.get("kvbm"):
        return values
    values |= {"DYN_KVBM_ONBOARD": "always", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(HOST_BLOCKS)}
    if options.get("disk"):
        values |= {
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(TIGHT_HOST_BLOCKS),
            "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": str(HOST_BLOCKS),
            "DYN_KVBM_DISK_CACHE_DIR": str(Path(request["work"]) / "disk"),
            "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
        }
    return values


def outputs_arguments(options: dict[str, Any], model: Path, rehearse: bool) -> dict[str, Any]:
    """The arguments of `vllm.LLM` for a case that compares answers. With KVBM the device is far too small."""
    shape = options.get("shape", "")
    block = MLA_BLOCK_TOKENS if shape == "mla" and not rehearse else BLOCK_TOKENS
    blocks = DEVICE_BLOCKS * BLOCK_TOKENS // block
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "block_size": block,
        "max_model_len": MODEL_TOKENS_MAX,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": blocks if options.get("kvbm") else blocks * ROOMY_TIMES,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
        **how_arguments(options["how"], rehearse),
    }
    if shape:
        arguments["load_format"] = "dummy"
    if shape == "fp8":
        arguments["kv_cache_dtype"] = "fp8"
    if options.get("kvbm"):
        arguments["kv_transfer_config"] = dict(CONNECTOR)
    return arguments


def how_arguments(how: str, rehearse: bool) -> dict[str, Any]:
    """float32 without graphs, or bfloat16 as a card serves it. A rehearsal knows the first alone."""
    if how == "fp32" or rehearse:
        return {"dtype": "float32", "enforce_eager": True}
    # Full graphs without Inductor, which would compile for minutes and is not what is tested.
    graphs = {"mode": 0, "cudagraph_mode": "FULL"}
    return {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "async_scheduling": True,
        "compilation_config": graphs,
        "gpu_memory_utilization": 0.8,
    }


def set_environment(values: dict[str, str]) -> None:
    """Before vLLM is imported."""
    assert "vllm" not in __import__("sys").modules, "vLLM reads its environment when it is imported"
    os.environ.update(values)


def what_ran(llm: Any) -> dict[str, Any]:
    """What vLLM made of its arguments: runner, graphs, scheduling, attention, precision."""
    engine = llm.llm_engine
    config = engine.vllm_config
    told: dict[str, Any] = {
        "async scheduling": bool(config.scheduler_config.async_scheduling),
        "eager": bool(config.model_config.enforce_eager),
        "graphs": str(getattr(config.compilation_config.cudagraph_mode, "name", "NONE")),
        "dtype": str(config.model_config.dtype),
        "kv dtype": str(config.cache_config.cache_dtype),
        "block tokens": config.cache_config.block_size,
    }
    executor = getattr(engine, "model_executor", None)
    if executor is not None:
        runner = executor.driver_worker.worker.model_runner
        modules = {base.__module__ for base in type(runner).__mro__}
        told["runner"] = "V2" if "vllm.v1.worker.gpu.model_runner" in modules else "V1"
        groups = getattr(runner, "attn_groups", None) or []
        names = {group.backend.get_name() for several in groups for group in several}
        told["attention"] = ", ".join(sorted(names))
    return told
