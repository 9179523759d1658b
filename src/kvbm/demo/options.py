"""The set-up of the experiment: its sizes, its model, and the three runs with how each server is started.

Pure: the runs are values; `experiment.py` carries them out.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvbm.demo.workload import Workload

CONNECTOR = json.dumps(
    {
        "kv_connector": "DynamoConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_load_failure_policy": "recompute",
    },
    separators=(",", ":"),
)
SERVED_NAME = "demo"
CPU_BLOCK_TOKENS = 128
CUDA_BLOCK_TOKENS = 16
CPU_KV_SPACE_GIB = 1


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command. `model` None means one of our own random-weight models."""

    output: Path
    model: str | None = None
    short: bool = False
    dtype: str = "float32"
    prefix_tokens: int | None = None
    cuda_device: str | None = None
    start_timeout_s: float = 300.0
    request_timeout_s: float = 120.0

    @property
    def cuda(self) -> bool:
        """Whether the engine runs on a CUDA device."""
        return self.cuda_device is not None


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One server: its environment (shown to the user), its connector (None: vLLM alone), the tiers that must serve."""

    name: str
    title: str
    environment: dict[str, str]
    connector: str | None
    required_tiers: tuple[str, ...]
    metrics_port: int | None = None


def workload_for(options: Options) -> Workload:
    """The sizes of the experiment: prefills long enough to be worth skipping, on the device at hand."""
    if options.short:
        documents, requests, tokens, block_tokens = 4, 10, 1024, CPU_BLOCK_TOKENS
    else:
        documents, requests, tokens, block_tokens = 5, 30, 2048, CPU_BLOCK_TOKENS
    if options.cuda:
        tokens, block_tokens = (4096 if options.short else 16_384), CUDA_BLOCK_TOKENS
    return Workload(
        document_count=documents,
        request_count=requests,
        prefix_tokens=options.prefix_tokens or tokens,
        max_tokens=8 if options.short else 16,
        block_tokens=block_tokens,
    )


def own_model_size(options: Options) -> str:
    """The size of our own model, which is served when the user names none."""
    if options.cuda:
        return "small"
    return "tiny" if options.short else "demo"


def three_runs(workload: Workload, disk_dir: Path, ports: tuple[int, int]) -> tuple[RunSpec, ...]:
    """vLLM alone; KVBM with room for everything in host memory; KVBM with too little of it, and a disk.

    Tiers are sized in blocks, exactly, so that the experiment is the same for every model. The third run turns the
    disk filter off: it admits a block only at its second offload, and this experiment is too short for that.
    """
    everything = workload.working_set_blocks * 5 // 4

    def metrics(port: int) -> dict[str, str]:
        return {"DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(port)}

    return (
        RunSpec(name="plain", title="vLLM alone", environment={}, connector=None, required_tiers=()),
        RunSpec(
            name="host",
            title="KVBM: host memory",
            environment={"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(everything), **metrics(ports[0])},
            connector=CONNECTOR,
            required_tiers=("host",),
            metrics_port=ports[0],
        ),
        RunSpec(
            name="disk",
            title="KVBM: host + disk",
            environment={
                "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(workload.small_host_blocks),
                "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": str(everything),
                "DYN_KVBM_DISK_CACHE_DIR": str(disk_dir),
                "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
                **metrics(ports[1]),
            },
            connector=CONNECTOR,
            required_tiers=("disk",),
            metrics_port=ports[1],
        ),
    )


def server_arguments(workload: Workload, spec: RunSpec, dtype: str) -> list[str]:
    """The arguments of one `vllm serve`, the same for all runs but for the connector."""
    arguments = [
        "--served-model-name", SERVED_NAME,
        "--dtype", dtype,
        "--enforce-eager",
        "--generation-config", "vllm",
        "--max-model-len", str(workload.max_model_len),
        "--max-num-seqs", "2",
        "--block-size", str(workload.block_tokens),
        "--num-gpu-blocks-override", str(workload.device_blocks),
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    if spec.connector is not None:
        arguments += ["--kv-transfer-config", spec.connector]
    return arguments


def server_environment(
    spec: RunSpec, inherited: dict[str, str], *, cuda: bool, local_model: bool
) -> dict[str, str]:
    """The environment of one server: the inherited one, without the user's KVBM settings, plus the run's own."""
    environment = {name: value for name, value in inherited.items() if not name.startswith("DYN_KVBM_")}
    environment["VLLM_NO_USAGE_STATS"] = "1"
    if not cuda:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_KV_SPACE_GIB))
        # vLLM sets cores aside, and another number of them with a connector than without: on a small machine its
        # own run would get half the threads of ours. All runs get the same.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if local_model:
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return environment | spec.environment
