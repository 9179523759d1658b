"""Disk without a host tier, in one process: where blocks are staged on their way, and how they get there.

Where the GPU reaches the disk itself (GDS, through NIXL), blocks are staged in GPU memory and host memory never sees
them. Everywhere else they are staged in host memory, and one line of the log says why.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from kvbm.clock import Clock
from kvbm.errors import SettingsError
from kvbm.layout import BlockLayout, Namespace
from kvbm.settings import container_limit_bytes
from kvbm.tiers.disk.block_io import DirectRefused
from kvbm.tiers.disk.geometry import AS_PARAMETERS, DiskSetting
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from kvbm.tiers.host import HostArena

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvbm.tiers.disk.tier")

GPU_BACKENDS = ("GDS_MT", "GDS")
"""In the order in which `auto` tries them: GDS_MT reports each transfer's own error, GDS the last one of a batch."""

DISK_DIRECT = ("auto", "off", "GDS", "GDS_MT", "POSIX")
_IO_THREADS = 4


class StagingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's options. `direct` is one of DISK_DIRECT; `device` names a device, "" the present CUDA device."""

    slot_count: int
    disk_dir: str
    disk_bytes: int
    setting: DiskSetting = AS_PARAMETERS
    direct: str
    device: str
    huge_pages: bool = True


class Staging(NamedTuple):
    """The arena, the tier that goes with it, and the arena as a tensor where it is no host memory.

    The arena has the type that a `Space` expects; a `DeviceArena` gives slots that only its own tier understands.
    """

    arena: HostArena
    tier: DiskTier
    tensor: torch.Tensor | None = None


def open_staging(options: StagingOptions, layout: BlockLayout, namespace: Namespace, clock: Clock) -> Staging:
    """Open the disk and a staging area, in device memory where `options.direct` allows it and the machine can.

    Raises SettingsError (also when a backend that was named cannot be used) and TierError.
    """
    if options.direct not in DISK_DIRECT:
        raise SettingsError("disk_direct", options.direct, f"one of: {', '.join(DISK_DIRECT)}")
    if options.direct == "auto":
        device, reasons = _cuda_device(options.device)
        for backend in GPU_BACKENDS if device is not None else ():
            assert device is not None
            try:
                return _open_direct(backend, device, options, layout, namespace, clock)
            except (DirectRefused, SettingsError) as error:
                reasons.append(str(error))
        level = logging.INFO if device is None else logging.WARNING
        log.log(level, "disk tier: blocks go through host memory, not directly: %s", "; ".join(reasons))
    elif options.direct != "off":
        device, reasons = _named_device(options)
        if device is None:
            raise SettingsError("disk_direct", options.direct, "; ".join(reasons))
        try:
            return _open_direct(options.direct, device, options, layout, namespace, clock)
        except DirectRefused as error:
            raise SettingsError("disk_direct", options.direct, str(error)) from error
    return _open_through_host(options, layout, namespace, clock)


def _open_direct(
    backend: str,
    device: torch.device,
    options: StagingOptions,
    layout: BlockLayout,
    namespace: Namespace,
    clock: Clock,
) -> Staging:
    """Raises DirectRefused where this backend cannot be used, SettingsError and TierError as everywhere."""
    from kvbm.tiers.nixl.block_io import open_nixl
    from kvbm.transfer.cuda.device import first_line
    from kvbm.transfer.device_arena import DeviceArena, DeviceMemory

    arena = DeviceArena(layout, options.slot_count, device)
    try:
        memory = DeviceMemory(arena)
    except RuntimeError as error:
        raise DirectRefused(f"{device} fails ({first_line(error)})") from error
    # NIXL changes the thread's present device, which may be another one of the engine's.
    with memory.active():
        io = open_nixl(backend, memory, _IO_THREADS)
    tier = open_disk_tier(
        options.disk_dir,
        layout,
        namespace,
        capacity_bytes=options.disk_bytes,
        setting=options.setting,
        io_threads=_IO_THREADS,
        clock=clock,
        io=io,
    )
    size = options.slot_count * layout.slot_bytes / 1e9
    log.info(
        "disk tier: blocks go directly between %s and %s (NIXL %s), staged in %.2f GB",
        device,
        tier.path,
        backend,
        size,
    )
    return Staging(cast(HostArena, arena), tier, arena.tensor)


def _open_through_host(
    options: StagingOptions, layout: BlockLayout, namespace: Namespace, clock: Clock
) -> Staging:
    arena = HostArena(
        layout,
        options.slot_count,
        limit_bytes=container_limit_bytes(),
        field="staging",
        huge_pages=options.huge_pages,
    )
    arena.touch(0)
    try:
        tier = open_disk_tier(
            Path(options.disk_dir),
            layout,
            namespace,
            capacity_bytes=options.disk_bytes,
            setting=options.setting,
            clock=clock,
        )
    except BaseException:
        arena.close()
        raise
    return Staging(arena, tier)


def _cuda_device(name: str) -> tuple[torch.device | None, list[str]]:
    """The CUDA device that is meant, or None and why there is none."""
    try:
        from kvbm.transfer.device_arena import cuda_device
    except ModuleNotFoundError as error:
        return None, [f"{error.name} is not installed"]
    device = cuda_device(name)
    return (None, [device]) if isinstance(device, str) else (device, [])


def _named_device(options: StagingOptions) -> tuple[torch.device | None, list[str]]:
    """The device for a backend that was named: plain memory for POSIX."""
    if options.direct != "POSIX":
        return _cuda_device(options.device)
    from kvbm.transfer.device_arena import CPU

    if options.device not in ("", "cpu"):
        return None, [f"POSIX moves plain memory, and {options.device} was named"]
    return CPU, []
