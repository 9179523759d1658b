"""Conclusions from the settings: default sizes, numbers of blocks, and notices about choices that may surprise.

All functions are pure, except the two that read how much memory there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvbm.present.numbers import format_bytes
from kvbm.settings.parse import GB, reject
from kvbm.settings.schema import FIELDS, Settings, variable
from kvbm.settings.setting import Kind

DEFAULT_ORIGIN = "default"
"""The origin of a setting that nobody set."""

DEFAULT_HOST_BYTES_MAX = 4 * GB
DEFAULT_HOST_MEMORY_SHARE = 4
"""The default host tier takes at most one part in this many of the available memory."""

UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""

DISK_STORES_MAX = 48
"""The most blocks in flight to the disk tier at one time, so that its queue always has room for loads."""

FILTERED_DISK_FACTOR = 8
"""A disk tier this many times as large as the host tier is there for blocks that come back late."""

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

    Without a host tier every block enters, within the write budget: there is no other place to keep it.
    """
    if settings.disk_on and not settings.host_on:
        return "all"
    return settings.disk_admission or ("filter" if settings.disk_offload_filter else "all")


def admission_notices(settings: Settings, block_bytes: int) -> list[tuple[str, str]]:
    """(what is odd, what to do) where the frequency filter makes a disk tier of this size worth less.

    The filter admits a block at its second offer within some ten minutes. Most such blocks are in host memory still.
    Of a disk tier whose size is set below that of the host tier, `notices` speaks.
    """
    filtered_disk = settings.host_on and settings.disk_on and admission_name(settings) == "filter"
    if not filtered_disk or _disk_is_smaller(settings):
        return []
    host = settings.host_blocks * block_bytes if settings.host_blocks else settings.host_bytes or 0
    disk = settings.disk_blocks * block_bytes if settings.disk_blocks else settings.disk_bytes or 0
    sizes = f"a disk tier of {format_bytes(disk)} beside {format_bytes(host)} of host memory"
    filtered = (
        "with the policy `filter`, disk takes only blocks that are offered twice within some ten minutes"
    )
    field = variable("disk_admission")
    if disk <= host:
        return [
            (
                f"{filtered}, and host memory mostly holds these: {sizes} adds little",
                f"set {field}=all, or make the disk tier larger than the host tier",
            )
        ]
    if disk >= FILTERED_DISK_FACTOR * host:
        return [
            (
                f"{filtered}: {sizes} keeps no prompt that comes back later than that",
                f"`kvbm record` and `kvbm simulate --admission NAME` compare {field}=all, ghost and filter",
            )
        ]
    return []


def _slots(field: str, size_bytes: int | None, blocks: int | None, block_bytes: int) -> int:
    assert block_bytes > 0
    if blocks:
        return blocks
    if not size_bytes:
        return 0
    if size_bytes < block_bytes:
        raise reject(
            variable(field), f"{size_bytes} bytes", f"room for one block at least, {block_bytes} bytes"
        )
    return size_bytes // block_bytes


def notices(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """One line for each choice that works but may not be what the user had in mind."""
    lines: list[str] = []
    if settings.peer_uids and not settings.manager:
        lines.append(
            f"{variable('peer_uids')} has no effect without a named socket ({variable('manager')}):"
            " any other socket is for one user"
        )
    if not settings.metrics:
        lines += _no_effect("without DYN_KVBM_METRICS", settings, origins, _needing("metrics"))
    if not settings.events_endpoint:
        lines += _no_effect("without DYN_KVBM_EVENTS_ENDPOINT", settings, origins, _needing("events"))
    if not settings.object_on and not settings.remote:
        lines += _no_effect("without a store (DYN_KVBM_REMOTE)", settings, origins, _needing("remote"))
    if not settings.fleet:
        lines += _no_effect("without a fleet (DYN_KVBM_FLEET)", settings, origins, _needing("fleet"))
    if not settings.beyond_on:
        lines += _no_effect(
            "without a store (DYN_KVBM_REMOTE) or a fleet (DYN_KVBM_FLEET)",
            settings,
            origins,
            _needing("beyond"),
        )
    if settings.remote or not settings.object_on:
        why = "beside DYN_KVBM_REMOTE" if settings.remote else "without DYN_KVBM_OBJECT_ENABLED and a bucket"
        lines += _no_effect(why, settings, origins, _needing("object"))
    if _disk_is_smaller(settings):
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


def _disk_is_smaller(settings: Settings) -> bool:
    """Whether both tiers are set by size, and the disk tier is the smaller one."""
    counted = settings.host_blocks or settings.disk_blocks
    return not counted and 0 < (settings.disk_bytes or 0) < (settings.host_bytes or 0)


def _staging_notices(settings: Settings) -> list[str]:
    size = format_bytes(settings.staging_bytes)
    lines = [f"a disk tier without a host tier: blocks pass through a staging area of {size} of host memory"]
    if settings.disk_admission not in (None, "all"):
        lines.append(
            f"{variable('disk_admission')} has no effect: without a host tier every block is written at once"
        )
    return lines


def _transfer_line(settings: Settings) -> str:
    """A line about two settings of the original: only their product counts here, up to the disk tier's own limit."""
    batches, size = settings.max_concurrent_transfers, settings.max_transfer_batch_size
    taken = f", of which the disk tier takes {DISK_STORES_MAX}" if batches * size > DISK_STORES_MAX else ""
    return (
        f"{variable('max_concurrent_transfers')}={batches} times"
        f" {variable('max_transfer_batch_size')}={size}: only their product counts,"
        f" {batches * size} blocks on their way to disk at one time{taken}"
    )


def _asked(settings: Settings, origins: Mapping[str, str], field: str) -> bool:
    """Whether the user set it to something other than off.

    A switch in its default position is off, and so is a size or a number of 0, unless the default is None.
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
    """One line that names those of the fields that the user set; no line if there are none."""
    asked = [variable(field) for field in fields if _asked(settings, origins, field)]
    return [f"no effect {why}: {', '.join(asked)}"] if asked else []


def size_notices(host_blocks: int, device_blocks: int) -> list[str]:
    """A line if the host tier is smaller than the engine's own cache: such a tier gives almost no hits."""
    if not 0 < host_blocks < device_blocks:
        return []
    line = f"the host tier holds {host_blocks} blocks, fewer than the device's {device_blocks}:"
    return [line + " it will mostly hold what the device holds; make it larger (DYN_KVBM_CPU_CACHE_GB)"]


def host_memory_field(settings: Settings) -> str:
    """The variable that sets the size of the host memory in use: of the host tier, or of the staging area."""
    if not settings.host_on:
        return variable("staging_bytes")
    return variable("host_blocks" if settings.host_blocks else "host_bytes")


def request_notices(
    settings: Settings, slots: int, block_bytes: int, block_tokens: int, request_blocks: int, namespaces: int
) -> list[str]:
    """A line if one request may need more blocks than there is host memory for, with the size that would hold it.

    Each of `namespaces` has `slots` blocks of host memory. `block_tokens` is 0 where blocks are of several groups.
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
    """The same for an engine of a shared manager, which does not know that manager's settings.

    `slots` is 0 without a host tier. The manager may have a disk tier, which keeps more.
    """
    if not 0 < slots < request_blocks:
        return []
    needed = _gigabytes(request_blocks * block_bytes)
    cut = _cut_line(slots, request_blocks, block_tokens, "loaded")
    return [f"the manager's host tier gives {cut}; {needed} GB for this model would hold it"]


def _cut_line(slots: int, request_blocks: int, block_tokens: int, held: str) -> str:
    if not block_tokens:  # a part of what a boundary needs is of no use
        return (
            f"{slots} blocks and one request may need {request_blocks} of all groups of layers (max_model_len): "
            f"one that needs more than {slots} is not {held} at all"
        )
    return (
        f"{slots} blocks and one request may need {request_blocks} (max_model_len, up to "
        f"{request_blocks * block_tokens} tokens): no more than {slots} of its blocks are {held} at a time"
    )


def _gigabytes(size_bytes: int) -> str:
    """The size in GB, rounded up, so that a setting of this value is large enough."""
    return f"{-(-size_bytes // 10**6) / 1e3:.3f}".rstrip("0").rstrip(".")


def shared_manager_notices(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """For engines: a line that names the settings that only the shared manager's own environment can change."""
    if not settings.manager:
        return []
    why = f"in an engine of the manager at {settings.manager}, which has its own"
    waiting = "with a shared manager, which start-up does not wait for"
    return [
        *_no_effect(why, settings, origins, _read_by("manager")),
        *_no_effect(waiting, settings, origins, ("init_timeout_s",)),
    ]


def manager_notices(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """For `kvbm manager`: a line that names the settings that only an engine reads."""
    return _no_effect("in a manager, as engines read it", settings, origins, _read_by("engine"))


def _needing(part: str) -> list[str]:
    return [field for field, setting in FIELDS.items() if setting.needs == part]


def _read_by(reader: str) -> list[str]:
    return [field for field, setting in FIELDS.items() if setting.reader == reader]


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup_limit: Path | None = None,
) -> int | None:
    """The memory that can be used: the kernel's MemAvailable, or the container's limit if that is less.

    None if neither can be read.
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


def container_limit_bytes(
    cgroup_limit: Path | None = None,
    root: Path = Path("/sys/fs/cgroup"),
    ours: Path = Path("/proc/self/cgroup"),
) -> int | None:
    """The most memory that this container, or this service, may use; None without a limit.

    The smallest limit of our control group and of those above it; `cgroup_limit` names one file to read instead.
    """
    files = list(_limit_files(root, ours)) if cgroup_limit is None else [cgroup_limit]
    limits = [limit for limit in map(_read_limit, files) if limit is not None]
    return min(limits, default=None)


def container_free_bytes(
    root: Path = Path("/sys/fs/cgroup"), ours: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The memory that this container, or this service, may still take; None without a limit.

    The least of its control groups. Cached files that nobody uses now count as free: the kernel drops them first.
    """
    free = []
    for file in _limit_files(root, ours):
        if (limit := _read_limit(file)) is None:
            continue
        first = file.name == "memory.max"
        used = _read_limit(file.with_name("memory.current" if first else "memory.usage_in_bytes"))
        if used is not None:
            cached = _read_stat(
                file.with_name("memory.stat"), "inactive_file" if first else "total_inactive_file"
            )
            free.append(max(0, limit - used + cached))
    return min(free, default=None)


def _read_stat(file: Path, name: str) -> int:
    try:
        words = (line.split() for line in file.read_text().splitlines())
        return next((int(number) for field, number in words if field == name), 0)
    except (OSError, ValueError):
        return 0


def _limit_files(root: Path, ours: Path) -> Iterator[Path]:
    """The limits of our group and of those above it. Inside a container its own group is often at the root."""
    try:
        groups = [line.split(":", 2) for line in ours.read_text().splitlines()]
    except OSError:
        groups = []
    for top, name, controller in (
        (root, "memory.max", ""),
        (root / "memory", "memory.limit_in_bytes", "memory"),  # cgroup v1
    ):
        yield top / name
        for group in groups:
            if len(group) == 3 and controller in group[1].split(","):
                path = Path(group[2].lstrip("/"))
                yield from (top / part / name for part in (path, *path.parents))


def _read_limit(file: Path) -> int | None:
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):
        return None  # another version of cgroups, or "max"
    return limit if limit < UNLIMITED_BYTES else None
