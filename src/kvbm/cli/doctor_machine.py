"""Checks of the machine: memory and its limits, the port of the metrics, and the versions of what is installed."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kvbm.cli.doctor_check import Check, advice, fault, ok
from kvbm.errors import SettingsError
from kvbm.observe.exporter import MetricsServer, PortTaken, metrics_url
from kvbm.present.numbers import format_bytes
from kvbm.settings import (
    Settings,
    container_limit_bytes,
    host_memory_field,
    variable,
)
from kvbm.vllm_integration.versions import SUPPORTED, too_old

COMFORTABLE_SHARE = 0.9
"""Above this share of a container's memory, the engine beside KVBM is likely to be killed for want of memory."""

NEWEST_TESTED = (0, 32)
_VERSION = Path("/proc/version")
_WSL = "microsoft"
"""In the version of a kernel of WSL2."""
_NVIDIA_SMI_TIMEOUT_S = 10.0
_LIBRARIES = ("blake3", "msgspec", "numpy", "typer", "xxhash")


def wanted_host_bytes(settings: Settings, block_bytes: int) -> int:
    """The host memory that a manager with these settings takes, for blocks of this size."""
    if not settings.host_on:
        return settings.staging_bytes
    return settings.host_blocks * block_bytes if settings.host_blocks else settings.host_bytes or 0


def check_memory(settings: Settings, block_bytes: int, available_bytes: int | None) -> Check:
    """The host tier against what there is. `available_bytes` is what nobody uses now."""
    name, field = "host memory", host_memory_field(settings)
    wanted = wanted_host_bytes(settings, block_bytes)
    limit = container_limit_bytes()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    where, more = "this machine has", ""
    if limit is not None and limit < total:
        total, where, more = limit, "this container may use", ", or give the container more memory"
    numbers = {"wanted_bytes": wanted, "total_bytes": total, "available_bytes": available_bytes or 0}
    found = f"{format_bytes(wanted)} wanted ({field}), {where} {format_bytes(total)}"
    if available_bytes is not None:
        found += f", {format_bytes(available_bytes)} of it free now"
    if wanted < block_bytes:
        remedy = f"raise {field}: it does not hold one block of {format_bytes(block_bytes)} (--block)"
        return fault(name, found, remedy, **numbers)
    if wanted > total:
        remedy = f"no block can be kept: lower {field}{more}"
        return fault(name, found, remedy, **numbers)
    if limit is not None and wanted > limit * COMFORTABLE_SHARE:
        remedy = f"leave room for the engine, or it is killed: lower {field}, or raise the container's limit"
        return advice(name, found, remedy, **numbers)
    if available_bytes is not None and wanted > available_bytes:
        remedy = f"fine if a manager that runs has taken it already; else lower {field}"
        return advice(name, found, remedy, **numbers)
    return ok(name, found, **numbers)


def gpu_bytes() -> int:
    """The memory of all GPUs together, as `nvidia-smi` reports it; 0 where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, check=True, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S
        )
        return sum(int(line) << 20 for line in answer.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def check_device(settings: Settings, block_bytes: int, device_cache_bytes: int, on_gpus: int) -> Check:
    """The host tier against the engine's own cache: a smaller one holds mostly what the device holds too."""
    name, field = "device cache", variable("host_bytes")
    if not settings.host_on:
        return ok(name, "there is no host tier to compare it with")
    host = wanted_host_bytes(settings, block_bytes)
    device = device_cache_bytes or on_gpus
    if not device:
        return ok(name, "no GPU here; --device-cache SIZE compares the host tier with an engine's own cache")
    called = "the engine's own cache" if device_cache_bytes else "all memory of the GPUs here"
    found = f"the host tier has {format_bytes(host)}, {called} {format_bytes(device)}"
    numbers = {"host_bytes": host, "device_bytes": device}
    if host >= device:
        return ok(name, found, **numbers)
    remedy = f"raise {field} above the engine's own cache: a smaller tier mostly holds what the device holds"
    if not device_cache_bytes:
        remedy += " (the engine's log names that size: give it to --device-cache to be exact)"
    return advice(name, found, remedy, **numbers)


def check_page_locks(settings: Settings, block_bytes: int, on_gpus: int, version: Path = _VERSION) -> Check:
    """What could refuse to lock host memory for a GPU's copies; whether there is enough of it `check_memory` says.

    The limit of `ulimit -l` cannot: the driver pins pages without counting them there.
    """
    name = "page locks"
    if not on_gpus:
        return ok(name, "they matter on GPUs only")
    wanted = format_bytes(wanted_host_bytes(settings, block_bytes))
    kernel = version.read_text().strip() if version.exists() else ""
    if _WSL in kernel.lower():
        return advice(
            name,
            "this is WSL2, where the driver may refuse to lock memory, or be unable to copy at the addresses of it",
            "copies are slower then, and the engine's log says so: Linux itself has no such limit",
        )
    limit = container_limit_bytes()
    if limit is None:
        return ok(
            name, f"{wanted} of host memory are locked for copies, which nothing but memory itself limits"
        )
    found = (
        f"{wanted} of host memory are locked for copies, and count in full in this container's limit of "
        f"{format_bytes(limit)}"
    )
    return ok(name, found, limit_bytes=limit)


def check_port(settings: Settings, managers_run: bool) -> Check:
    """Whether the metrics can be served where the settings say."""
    name, field = "metrics port", variable("metrics_port")
    if not settings.metrics:
        return ok(
            name, f"metrics are off; {variable('metrics')}=true serves them on port {settings.metrics_port}"
        )
    where = f"{settings.metrics_host}:{settings.metrics_port}"
    try:
        MetricsServer(lambda: "", settings.metrics_host, settings.metrics_port).close()
    except PortTaken:
        if managers_run:
            url = metrics_url(settings.metrics_host, settings.metrics_port)
            return ok(name, f"{where} is in use, and a manager runs: curl {url} shows whose it is")
        remedy = (
            f"an engine's own manager takes the next free port, `kvbm manager` does not start: set {field}"
        )
        return advice(name, f"{where} is in use by another program", remedy)
    except SettingsError as error:
        return fault(name, str(error), "a manager will not start with it")
    return ok(name, f"{where} is free")


def check_versions() -> Iterator[Check]:
    """The engine, and the libraries that KVBM stands on."""
    vllm = _version("vllm")
    name, wanted = "vLLM", f"supported are {SUPPORTED}"
    if not vllm:
        yield ok(name, f"not installed here, which is fine for a manager; {wanted}")
    elif too_old(vllm):
        yield fault(name, f"{vllm} is too old", f"{wanted}: pip install -U vllm")
    elif _release(vllm) > NEWEST_TESTED:
        yield advice(name, f"{vllm} is newer than all that were tested", f"{wanted}; watch for `KVBM is off`")
    else:
        yield ok(name, f"{vllm}; {wanted}")
    lacking = [library for library in _LIBRARIES if not _imports(library)]
    versions = ", ".join(
        f"{library} {_version(library) or 'without version'}"
        for library in ("openkvbm", "torch", *_LIBRARIES)
        if library not in lacking and (library in _LIBRARIES or _version(library))
    )
    found = f"Python {platform.python_version()}, Linux {platform.release()}, {versions}"
    if lacking:
        yield fault(
            "libraries", f"{', '.join(lacking)} cannot be imported", f"pip install {' '.join(lacking)}"
        )
    else:
        yield ok("libraries", found)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0, 0)


def _imports(library: str) -> bool:
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True
