"""What the settings come to on this machine: default sizes, block counts, and notices about odd choices.

Nothing here changes anything; the functions are pure but for the two that read how much memory there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbm.present.numbers import format_bytes
from kvbm.settings.parse import GB, reject
from kvbm.settings.schema import FIELDS, Settings
from kvbm.settings.setting import Kind

DEFAULT_ORIGIN = "default"
"""Where a setting comes from that nobody set."""

DEFAULT_HOST_BYTES_MAX = 4 * GB
DEFAULT_HOST_MEMORY_SHARE = 4
"""The default host tier takes at most one part in this many of the available memory."""

DISK_STORES_MAX = 48
"""Blocks that the disk tier lets be on their way to it at one time, so that loads always find room."""

_TRANSFER_FIELDS = ("max_concurrent_transfers", "max_transfer_batch_size")


def default_host_bytes(memory_bytes: int | None) -> int:
    """The host tier when no tier is set: 4 GB, or a quarter of the available memory if that is less."""
    if memory_bytes is None:
        return DEFAULT_HOST_BYTES_MAX
    return min(DEFAULT_HOST_BYTES_MAX, memory_bytes // DEFAULT_HOST_MEMORY_SHARE)


def host_slots(settings: Settings, block_bytes: int) -> int:
    """Blocks of the host tier, for blocks of `block_bytes` over all ranks; 0 when the tier is off.

    A tier that is on but cannot hold one block is a `SettingsError`.
    """
    return _slots("host_bytes", settings.host_bytes, settings.host_blocks, block_bytes)


def disk_slots(settings: Settings, block_bytes: int) -> int:
    """Blocks of the disk tier; the same rules as `host_slots`."""
    return _slots("disk_bytes", settings.disk_bytes, settings.disk_blocks, block_bytes)


def staging_slots(settings: Settings, block_bytes: int) -> int:
    """Blocks of the staging area: 0 unless there is a disk tier and no host tier."""
    if settings.host_on or not settings.disk_on:
        return 0
    return _slots("staging_bytes", settings.staging_bytes, None, block_bytes)


def admission_name(settings: Settings) -> str:
    """The name of the admission policy of the disk tier.

    Without a host tier every block enters, but for the write budget: there is nowhere else to keep it.
    """
    if settings.disk_on and not settings.host_on:
        return "all"
    return settings.disk_admission or ("filter" if settings.disk_offload_filter else "all")


def _slots(field: str, size_bytes: int | None, blocks: int | None, block_bytes: int) -> int:
    assert block_bytes > 0
    if blocks:
        return blocks
    if not size_bytes:
        return 0
    if size_bytes < block_bytes:
        raise reject(
            FIELDS[field].variable, f"{size_bytes} bytes", f"room for one block at least, {block_bytes} bytes"
        )
    return size_bytes // block_bytes


def notices(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """One line for each choice that works but may not be what the user had in mind."""
    lines: list[str] = []
    if settings.metrics and settings.metrics_host == "127.0.0.1":
        lines.append(
            "metrics are served on 127.0.0.1 only;"
            " set DYN_KVBM_METRICS_HOST=0.0.0.0 to scrape them from elsewhere"
        )
    if settings.peer_uids and not settings.manager:
        lines.append(
            f"{FIELDS['peer_uids'].variable} has no effect: a socket that nobody named"
            f" ({FIELDS['manager'].variable}) is for one user"
        )
    if not settings.metrics:
        lines += _no_effect("without DYN_KVBM_METRICS", settings, origins, _needing("metrics"))
    counted = settings.host_blocks or settings.disk_blocks
    if not counted and 0 < (settings.disk_bytes or 0) < (settings.host_bytes or 0):
        lines.append(
            f"the disk tier ({format_bytes(settings.disk_bytes or 0)}) is smaller than the host tier"
            f" ({format_bytes(settings.host_bytes or 0)}) and will hold little that the host does not"
        )
    if not settings.disk_on:
        lines += _no_effect(
            "without a disk tier (DYN_KVBM_DISK_CACHE_GB)", settings, origins, _needing("disk")
        )
        return lines
    if settings.host_on:
        lines += _no_effect("where there is a host tier", settings, origins, ("staging_bytes",))
    else:
        lines += _staging_notices(settings)
    if any(_asked(settings, origins, field) for field in _TRANSFER_FIELDS):
        lines.append(_transfer_line(settings))
    return lines


def _staging_notices(settings: Settings) -> list[str]:
    unread = {
        "disk_admission": settings.disk_admission not in (None, "all"),
        "disk_write": settings.disk_write != "through",
    }
    return [
        (
            "a disk tier without a host tier: blocks pass through a staging area of"
            f" {format_bytes(settings.staging_bytes)} of host memory"
        ),
        *(
            f"{FIELDS[field].variable} has no effect: without a host tier every block is written at once"
            for field, asked in unread.items()
            if asked
        ),
    ]


def _transfer_line(settings: Settings) -> str:
    """Two settings of the original of which only the product is left, and that within the disk tier's own bound."""
    batches, size = settings.max_concurrent_transfers, settings.max_transfer_batch_size
    taken = f", of which the disk tier takes {DISK_STORES_MAX}" if batches * size > DISK_STORES_MAX else ""
    return (
        f"{FIELDS['max_concurrent_transfers'].variable}={batches} times"
        f" {FIELDS['max_transfer_batch_size'].variable}={size}: only their product counts,"
        f" {batches * size} blocks on their way to disk at one time{taken}"
    )


def _asked(settings: Settings, origins: Mapping[str, str], field: str) -> bool:
    """The user set it, and not to off: a switch as it is by default, or a size or number of 0, asks for nothing.

    Where the default is no value at all, 0 is one.
    """
    if origins.get(field, DEFAULT_ORIGIN) == DEFAULT_ORIGIN or FIELDS[field].no_effect:
        return False
    value: object = getattr(settings, field)
    kind = FIELDS[field].kind
    if kind is Kind.SWITCH:
        return bool(value != getattr(Settings(), field))
    if getattr(Settings(), field) is None:
        return value is not None
    return bool(value) or kind not in (Kind.SIZE, Kind.COUNT)


def _no_effect(why: str, settings: Settings, origins: Mapping[str, str], fields: Iterable[str]) -> list[str]:
    """One line that names all that the user set of these, or none."""
    asked = [FIELDS[field].variable for field in fields if _asked(settings, origins, field)]
    return [f"no effect {why}: {', '.join(asked)}"] if asked else []


def size_notices(host_blocks: int, device_blocks: int) -> list[str]:
    """A line when the host tier is smaller than the engine's own cache, which gives next to no hits."""
    if not 0 < host_blocks < device_blocks:
        return []
    line = f"the host tier holds {host_blocks} blocks, fewer than the device's {device_blocks}:"
    return [line + " it will mostly hold what the device holds; make it larger (DYN_KVBM_CPU_CACHE_GB)"]


def host_memory_field(settings: Settings) -> str:
    """The variable that says how much host memory blocks go through: that of the tier, or of the staging area."""
    if not settings.host_on:
        return FIELDS["staging_bytes"].variable
    return FIELDS["host_blocks" if settings.host_blocks else "host_bytes"].variable


def request_notices(
    settings: Settings, slots: int, block_bytes: int, block_tokens: int, request_blocks: int, namespaces: int
) -> list[str]:
    """A line when one request may have more blocks than the host memory they go through, with the size that holds it.

    `slots` is what each of `namespaces` has.
    """
    if request_blocks <= slots:
        return []
    field = host_memory_field(settings)
    needed = _gigabytes(request_blocks * namespaces * block_bytes)
    size_bytes = settings.host_bytes if settings.host_on else settings.staging_bytes
    here, enough = f"{(size_bytes or 0) / 1e9:g}", f"{field}={needed}"
    if settings.host_blocks:
        here, enough = f"{settings.host_blocks}", f"{field}={request_blocks * namespaces} ({needed} GB)"
    held = "loaded" if settings.disk_on else "kept or loaded"
    cut = _cut_line(slots, request_blocks, block_tokens, held)
    return [f"{field}={here} gives {cut}; {enough} would hold it"]


def shared_request_notices(slots: int, block_bytes: int, block_tokens: int, request_blocks: int) -> list[str]:
    """The same for an engine of a shared manager, whose settings it does not know; `slots` is 0 without a host tier.

    There may be a disk, which keeps more.
    """
    if not 0 < slots < request_blocks:
        return []
    needed = _gigabytes(request_blocks * block_bytes)
    cut = _cut_line(slots, request_blocks, block_tokens, "loaded")
    return [f"the manager's host tier gives {cut}; {needed} GB for this model would hold it"]


def _cut_line(slots: int, request_blocks: int, block_tokens: int, held: str) -> str:
    return (
        f"{slots} blocks and one request may need {request_blocks} (max_model_len, up to "
        f"{request_blocks * block_tokens} tokens): no more than {slots} of its blocks are {held} at a time"
    )


def _gigabytes(size_bytes: int) -> str:
    """Rounded up, so that it holds so much."""
    return f"{-(-size_bytes // 10**6) / 1e3:.3f}".rstrip("0").rstrip(".")


def shared_manager_notices(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """For engines: a line that names what was set beside a shared manager and is that manager's own affair."""
    if not settings.manager:
        return []
    why = f"in an engine of the manager at {settings.manager}, which has its own"
    waiting = "with a shared manager, which start-up does not wait for"
    return [
        *_no_effect(why, settings, origins, _read_by("manager")),
        *_no_effect(waiting, settings, origins, ("init_timeout_s",)),
    ]


def manager_notices(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """For `kvbm manager`: a line that names what was set and is each engine's own affair."""
    return _no_effect("in a manager, as engines read it", settings, origins, _read_by("engine"))


def _needing(part: str) -> list[str]:
    return [field for field, setting in FIELDS.items() if setting.needs == part]


def _read_by(reader: str) -> list[str]:
    return [field for field, setting in FIELDS.items() if setting.reader == reader]


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup_limit: Path = Path("/sys/fs/cgroup/memory.max"),
) -> int | None:
    """Memory that can be used: what the kernel calls available, or the container's limit if that is less.

    None where neither can be read.
    """
    limit_bytes = container_limit_bytes(cgroup_limit)
    found = [] if limit_bytes is None else [limit_bytes]
    try:
        for line in meminfo.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                found.append(int(amount.split()[0]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    return min(found, default=None)


def container_limit_bytes(cgroup_limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Memory that this container may use at all; None without a limit."""
    try:
        return int(cgroup_limit.read_text())
    except (OSError, ValueError):
        return None  # no cgroup v2, or "max"
