"""One block through the tiers: host memory, a file in the configured directory, and back, every byte compared."""

from __future__ import annotations

import hashlib
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.cli.doctor_check import Check, fault, ok
from kvbm.errors import KvbmError
from kvbm.layout import BlockLayout, Namespace
from kvbm.present.numbers import format_bytes
from kvbm.settings import Settings, container_limit_bytes, host_memory_field
from kvbm.tiers.contract import BlockHead, RunTier
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.tier import open_disk_tier
from kvbm.tiers.host import HostArena

ROUNDS = 3
"""The fastest of so many is shown: the first one pays for pages and for the file's blocks."""

HOST_SPAN_BYTES = 64 << 20
"""Host memory is measured over so much of it, as one block alone may stay in the CPU's cache."""

DEADLINE_S = 20.0
SCRATCH_PREFIX = ".kvbm-doctor-"
"""A directory of our own: so the tier finds no cache of an engine there, and removes none."""

_NAMESPACE = Namespace(model="kvbm doctor", fields=(("weights", "none"),), ephemeral=True)
_WRITTEN, _READ = SlotIndex(0), SlotIndex(1)


def check_round_trip(
    settings: Settings, block_bytes: int, disk_root: Path | None, syscalls: Syscalls | None = None
) -> list[Check]:
    """A block in host memory and, with a directory, on disk too."""
    layout = BlockLayout(block_tokens=16, shard_bytes=block_bytes)
    try:
        slots = 2 * max(1, HOST_SPAN_BYTES // 2 // layout.block_bytes)
        arena = HostArena(
            layout, slots, 1, container_limit_bytes(), host_memory_field(settings), settings.huge_pages
        )
    except KvbmError as error:
        return [fault("host round trip", str(error), "free memory, or raise the container's limit")]
    content = hashlib.shake_128(b"kvbm doctor").digest(layout.block_bytes)
    try:
        checks = [_through_host(arena, content)]
        if disk_root is not None:
            checks.append(_through_disk(settings, arena, content, disk_root, syscalls))
        return checks
    finally:
        arena.close()


def _through_host(arena: HostArena, content: bytes) -> Check:
    """Written into the first half of the slots, copied from there to the second half, and compared."""
    size, half = len(content), arena.slot_count // 2
    views = [arena.slot_views(SlotIndex(slot))[0] for slot in range(arena.slot_count)]
    write_s = min(_seconds(lambda: _fill(views[:half], [content] * half)) for _ in range(ROUNDS)) / half
    read_s = min(_seconds(lambda: _fill(views[half:], views[:half])) for _ in range(ROUNDS)) / half
    same = all(view == content for view in views)
    for view in views:
        view.release()
    if not same:
        return fault(
            "host round trip", f"{size} bytes came back changed", "suspect the machine's memory: test it"
        )
    return ok("host round trip", speeds(size, write_s, read_s), **measured(size, write_s, read_s))


def _fill(targets: Sequence[memoryview], sources: Sequence[bytes | memoryview]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[:] = source


def _through_disk(
    settings: Settings, arena: HostArena, content: bytes, root: Path, syscalls: Syscalls | None
) -> Check:
    name = "disk round trip"
    scratch = ""
    try:
        scratch = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=root)
        tier = open_disk_tier(
            scratch,
            arena.layout,
            _NAMESPACE,
            capacity_blocks=ROUNDS,
            io_threads=1,
            o_direct=settings.disk_o_direct,
            zerofill_fallback=settings.disk_zerofill_fallback,
            persist=False,
            syscalls=syscalls,
        )
        try:
            return _store_and_load(name, tier, arena, content)
        finally:
            tier.close(keep=False)
    except (KvbmError, OSError) as error:
        text = " ".join(str(error).replace(scratch or str(root), str(root)).split())
        return fault(name, text, f"no block can be kept in {root}: free space there, or mend the disk")
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def _store_and_load(name: str, tier: RunTier, arena: HostArena, content: bytes) -> Check:
    size = len(content)
    sources, targets = arena.slot_views(_WRITTEN), arena.slot_views(_READ)
    times: list[tuple[float, float]] = []
    try:
        for turn in range(ROUNDS):
            key, slot = BlockKey(hashlib.sha256(b"kvbm doctor %d" % turn).digest()), SlotIndex(turn)
            sources[0][:] = content
            targets[0][:] = bytes(size)
            seconds = []
            for submit in (
                lambda key=key, slot=slot: tier.submit_store(slot, [BlockHead(key, None)], slot, sources),
                lambda key=key, slot=slot: tier.submit_load(slot, [key], slot, targets),
            ):
                begun_s = time.monotonic()
                if trouble := _complete(tier, submit):
                    return fault(
                        name, trouble, "blocks are not kept on this disk: mend it, or use another one"
                    )
                seconds.append(time.monotonic() - begun_s)
            if bytes(targets[0]) != content:
                return fault(name, f"{size} bytes came back changed", "use another disk: this one loses data")
            times.append((seconds[0], seconds[1]))
    finally:
        for view in (*sources, *targets):
            view.release()
    write_s, read_s = (min(column) for column in zip(*times, strict=True))
    return ok(name, speeds(size, write_s, read_s), **measured(size, write_s, read_s))


def _complete(tier: RunTier, submit: Callable[[], Outcome]) -> str:
    """Submit and wait; what went wrong in one line, or nothing."""
    outcome = submit()
    if outcome is not Outcome.PENDING:
        return tier.fault or f"the disk tier answered {outcome.name}"
    if not select.select([tier.fileno()], [], [], DEADLINE_S)[0]:
        return f"one block took longer than {DEADLINE_S:g} s"
    (completion,) = tier.poll()
    if completion.outcome is Outcome.HIT:
        return ""
    return completion.error or ("it came back changed" if completion.corrupt else "it was not found again")


def _seconds(action: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


def speeds(size: int, write_s: float, read_s: float) -> str:
    """What is said of a block that came back as it was."""
    return (
        f"one block of {format_bytes(size)}: written at {_rate(size, write_s)}, read at {_rate(size, read_s)}, "
        "every byte as it was"
    )


def _rate(size: int, seconds: float) -> str:
    return f"{format_bytes(size / max(seconds, 1e-9))}/s ({seconds * 1e3:.3g} ms)"


def measured(size: int, write_s: float, read_s: float) -> dict[str, float | int | str]:
    """The same for programs."""
    return {"block_bytes": size, "write_seconds": write_s, "read_seconds": read_s}
