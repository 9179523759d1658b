"""Time to first token of a long prompt that comes back: computed, found on the device, found in a tier.

The measurement is that of `benchmarks.ttft`, on a card with CUDA graphs and a model of Llama-3.1-8B's shape. Every case
is one engine; KVBM and vLLM's own offloading get the same requests. vLLM's own files are not verified when read.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ttft
from benchmarks.engine import BLOCK_TOKENS, Scenario
from benchmarks.gpu_kit.engines import set_environment
from benchmarks.gpu_kit.ledger import Row, make_row
from benchmarks.gpu_kit.shapes import CONFIGS, write_shape
from kvbm.testing.tiny_model import SHAPES

REPEATS, REHEARSED_REPEATS = 6, 2
REHEARSED_TOKENS_MAX = 8192
"""A rehearsal takes prompts of half the length, at most this. Shorter ones have too few blocks to tell tiers apart."""
KEPT_PROMPTS = ttft.COLD_PROMPTS + 2
COLUMNS = {"cold": "computed", "device": "on the device", "tier": "in the tier"}


def measure(request: dict[str, Any]) -> Row:
    """The row of one engine. Raises RuntimeError when a request came from somewhere else."""
    options, rehearse = request["options"], request["rehearse"]
    tokens = min(options["tokens"] // 2, REHEARSED_TOKENS_MAX) if rehearse else options["tokens"]
    model, more = engine_model(Path(request["folder"]), rehearse)
    blocks = tokens // BLOCK_TOKENS
    block_bytes = kv_bytes_per_token(rehearse) * BLOCK_TOKENS
    set_environment({"VLLM_CPU_KVCACHE_SPACE": "1"} if rehearse else {"VLLM_LOGGING_LEVEL": "INFO"})
    with tempfile.TemporaryDirectory(dir=request["work"]) as scratch:
        chosen = make_scenario(options["scenario"], blocks, block_bytes, Path(scratch), rehearse)
        times = ttft.measure(
            str(model), chosen, tokens, REHEARSED_REPEATS if rehearse else REPEATS, "bfloat16", more=more
        )
    row: dict[str, Any] = {"prompt tokens": tokens, "engine": ttft.TITLES[chosen.name]}
    for kind in ("cold", "device", "tier"):
        row[f"{COLUMNS[kind]} ms"] = statistics.median(times[kind]) * 1e3 if times[kind] else None
    if times["tier"]:
        pairs = zip(times["tier"], times["device"], strict=True)
        row["tier - device ms"] = statistics.median(tier - device for tier, device in pairs) * 1e3
    return make_row([], {"seconds": times}, "Time to first token", [row])


def make_scenario(name: str, blocks: int, block_bytes: int, scratch: Path, rehearse: bool) -> Scenario:
    """How an engine is set up. On a card vLLM's own offloading is vLLM's alone; a CPU needs our copy in it."""
    roomy, tight = blocks * KEPT_PROMPTS, blocks + 2
    if rehearse or name not in ttft.NATIVE:
        return ttft.scenario(name, roomy, tight, block_bytes, scratch)
    extra: dict[str, Any] = {"cpu_bytes_to_use": (roomy if name == "native-host" else tight) * block_bytes}
    files = None
    if name == "native-fs":
        files = str(scratch)
        extra |= {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": files}],
        }
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    tier = "host" if name == "native-host" else "disk"
    return Scenario(name=name, tier=tier, transfer_config=config, files=files)


def engine_model(folder: Path, rehearse: bool) -> tuple[Path, dict[str, Any]]:
    """The model that is timed, and vLLM's arguments for it."""
    if rehearse:
        from kvbm.testing.tiny_model import make_model

        return make_model(folder / "models" / "tiny-bf16", "tiny", "bfloat16"), {"skip_tokenizer_init": True}
    model = write_shape(folder / "models", "llama", small=False)
    graphs = {"mode": 0, "cudagraph_mode": "FULL"}
    return model, {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": False,
        "compilation_config": graphs,
        "gpu_memory_utilization": 0.85,
    }


def kv_bytes_per_token(rehearse: bool) -> int:
    """Bytes of KV that one token of the timed model takes, in bfloat16."""
    if rehearse:
        return SHAPES["tiny"].kv_bytes_per_token("bfloat16")
    config = CONFIGS["llama"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 2)
