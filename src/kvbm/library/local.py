"""Blocks that are kept in this process: the `Space` that serves engines, without a socket, driven by its caller."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, cast

import msgspec

from kvbm.block import BlockKey
from kvbm.clock import Clock
from kvbm.errors import CopyHung, SettingsError
from kvbm.hashing import EngineKeys
from kvbm.hints import UNHINTED, ClientHint
from kvbm.layout import BlockLayout, Namespace
from kvbm.library.backend import Looked, Run, Stored
from kvbm.library.copiers import Copiers
from kvbm.library.layer_load import LayerLoad
from kvbm.library.staging import StagingOptions, open_staging
from kvbm.library.store import await_listing, open_store, write_out
from kvbm.manager.choices import bound_writes, choose_admission, refuse_eviction
from kvbm.manager.hearing import decided_here
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.leases import Lease
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy
from kvbm.protocol import HELD
from kvbm.settings import Settings, container_limit_bytes, parse_size
from kvbm.settings.places import default_runtime_dir
from kvbm.slices import at_once
from kvbm.tiers.contract import RunTier
from kvbm.tiers.disk.geometry import DiskSetting
from kvbm.tiers.disk.tier import open_disk_tier
from kvbm.tiers.host import HostArena

if TYPE_CHECKING:
    import torch

    from kvbm.transfer import Copier, DeviceCache

_OWNER = 0
_ARRIVAL_DEADLINE_S = 30.0
_POLL_S = 0.0002
_TICK_S = 0.5
_CLOSE_FLUSH_S = 5.0


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `BlockManager` of the same names, as its caller wrote them; `store` has those of its store,
    checked, and is None without one."""

    host: str | int | None
    disk: str | int | None
    disk_dir: str
    eviction: str
    disk_admission: str
    disk_write_budget: str | int
    staging: str | int
    disk_direct: str
    device: str
    huge_pages: bool
    store: Settings | None = None


@dataclass(eq=False)
class _LocalRun:
    number: int
    lease: Lease
    space: Space
    left_because: str = "unused"

    @property
    def sources(self) -> bytes:
        return self.space.counted_sources(bytes(self.lease.sources))

    @property
    def boundary(self) -> int:
        return self.lease.boundary


class LocalSpace:
    """A `Backend` over a space of its own. Raises SettingsError for options that cannot be used."""

    def __init__(
        self, options: LocalOptions, layout: BlockLayout, namespace: Namespace, metrics: Metrics, clock: Clock
    ) -> None:
        refuse_eviction("eviction", options.eviction)
        self._layout = layout
        self._namespace = namespace
        self._clock = clock
        self.stays = 0
        self._numbers = count(1)
        self._tick_s = clock()
        self._copiers = Copiers(layout, self._new_copier)
        field, size = ("staging", options.staging) if options.host is None else ("host", options.host)
        slots = _bytes(field, size) // layout.block_bytes
        if slots < 1:
            raise SettingsError(field, size, f"at least one block of {layout.block_bytes} bytes")
        disk_bytes = 0 if options.disk is None else _bytes("disk", options.disk)
        admission = self._admission(options, disk_bytes)
        wanted = StagingOptions(
            slot_count=slots,
            disk_dir=options.disk_dir,
            disk_bytes=disk_bytes,
            setting=DiskSetting(root="disk_dir", size="disk", as_set=options.disk, unowned=""),
            direct=options.disk_direct,
            device=options.device,
            huge_pages=options.huge_pages,
        )
        if options.host is None and options.store is not None:
            raise SettingsError(
                "host", None, "a size, where there is a remote tier: blocks pass through host memory"
            )
        arena, tier, self._device_slots = self._open_tiers(wanted, options.host, options.disk)
        with contextlib.ExitStack() as undo:
            undo.callback(arena.close)
            if tier is not None:
                undo.callback(tier.close, keep=True)
            remotes = open_store(options.store, layout, namespace, clock) if options.store is not None else ()
            for remote, _, _ in remotes:
                undo.callback(remote.close)
            self.space = Space(
                layout,
                arena,
                tier,
                admission,
                metrics,
                clock,
                lambda lease: None,
                SpaceOptions(
                    staging=options.host is None,
                    eviction=options.eviction,
                ),
                remotes,
            )
            undo.pop_all()
        for side in self.space.remotes:
            assert options.store is not None
            await_listing(side, self._turn, options.store.remote_deadline_ms / 1000)

    def lookup(
        self, keys: list[BlockKey], skip: int, told: EngineKeys | None = None, asker: ClientHint = UNHINTED
    ) -> Looked:
        del told  # nobody asks a program why
        number = next(self._numbers)
        self._turn()
        skip = min(skip, len(keys))
        found = at_once(self.space.looking_up(_OWNER, number, keys, skip, asker))
        lease = found.lease
        reached = skip + len(self.space.prompt_sources(lease))
        decided = at_once(self.space.heard(asker, keys, reached))
        run = _LocalRun(number, lease, self.space) if lease is not None else None
        return Looked(run, decided_here(asker.verdicts, found.judged, decided))

    def descriptors(self) -> tuple[int, ...]:
        return tuple(self.space.below.filenos()) if self.space.remotes else ()

    def refresh(self) -> None:
        self._turn()

    def ready(self, run: Run) -> tuple[int, bool]:
        assert isinstance(run, _LocalRun)
        self._turn()
        return run.lease.ready, not run.lease.final

    def load(
        self, run: Run, kv_cache: Mapping[str, torch.Tensor], device_blocks: Sequence[int], first: int = 0
    ) -> int:
        assert isinstance(run, _LocalRun)
        lease, end = run.lease, first + len(device_blocks)
        deadline_s = self._clock() + _ARRIVAL_DEADLINE_S
        while lease.ready < end and not lease.final and self._clock() < deadline_s:
            self._turn()
            if not lease.final:
                time.sleep(_POLL_S)
        slots = lease.slots[first : min(lease.ready, end)]
        if slots:
            self._copiers.of(kv_cache).load(list(zip(device_blocks, slots, strict=False)))
        return len(slots)

    def load_by_layer(
        self, wanted: Sequence[tuple[Run, Sequence[int]]], kv_cache: Mapping[str, torch.Tensor]
    ) -> LayerLoad | None:
        runs = [(cast(_LocalRun, run), blocks) for run, blocks in wanted]
        if any(run.lease.ready < len(blocks) for run, blocks in runs):
            return None
        pairs = [pair for run, blocks in runs for pair in zip(blocks, run.lease.slots, strict=False)]
        return LayerLoad(self._copiers.of(kv_cache), pairs, lambda: True, lambda right: None)

    def release(self, run: Run) -> None:
        assert isinstance(run, _LocalRun)
        self.space.release(_OWNER, run.number)

    def finished(self, key: BlockKey) -> None:
        self.space.finished(key, 0)

    def store(
        self,
        keys: list[BlockKey],
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int],
        parent: BlockKey | None = None,
        groups: bytes = b"",
        tenant: str = "",
    ) -> list[Stored]:
        self._turn()
        number = next(self._numbers)
        # A sequence is offered again each time it has grown: step over the held blocks in one go.
        found = self.space.host_pool.find_all(keys)
        held = found.index(None) if None in found else len(keys)
        before = keys[held - 1] if held else parent
        kinds = groups[held:] or 0
        answer = self.space.reserve(_OWNER, number, before, keys[held:], group=kinds, tenant=tenant)
        outcomes = [Stored.HELD] * held + [Stored.HELD if s == HELD else Stored.REFUSED for s in answer]
        pairs = [(device_blocks[i], slot) for i, slot in enumerate(answer, held) if slot >= 0]
        if not pairs:
            return outcomes
        try:
            self._copiers.store(kv_cache, pairs)
        except CopyHung:
            raise  # the slots stay reserved: they may still be written
        except BaseException:
            self.space.commit(_OWNER, number, range(len(pairs)))
            raise
        self.space.commit(_OWNER, number, ())
        self.space.pump()  # victims of the next call are written meanwhile
        return [
            Stored.COPIED if slot >= 0 else outcomes[i] for i, slot in enumerate([HELD] * held + list(answer))
        ]

    def flush(self, timeout_s: float) -> bool:
        deadline_s = self._clock() + timeout_s
        for side in self.space.remotes:
            write_out(side)
        if not self._wait_while(lambda: self.space.busy, deadline_s):
            return False
        # Others learn of what was written from our log in the store.
        return all(side.tier.drain(max(0.0, deadline_s - self._clock())) for side in self.space.remotes)

    def clear(self, tier: str) -> int:
        return self.space.clear(tier)[0]

    def status(self) -> dict[str, object]:
        namespace = self._namespace
        return {"namespace": namespace.short, "model": namespace.model, **self.space.describe()}

    def close(self) -> None:
        disk = self.space.disk
        if disk is not None:
            self._wait_while(lambda: disk.queued_count > 0, self._clock() + _CLOSE_FLUSH_S)
        self._copiers.close()
        # What waits for a store is written out there, for a few seconds at most.
        self.space.close(keep=True)

    def _wait_while(self, busy: Callable[[], bool], deadline_s: float) -> bool:
        """Take in what arrives while it is so; False when it still is at that time."""
        while busy():
            if self._clock() >= deadline_s:
                return False
            self._turn()
            time.sleep(_POLL_S)
        return True

    def _turn(self) -> None:
        """Take in what has arrived and begin what can begin; about twice a second, also what is due by the clock."""
        now_s = self._clock()
        if now_s >= self._tick_s:
            self._tick_s = now_s + _TICK_S
            self.space.below.tick()
        self.space.pump()

    def _open_tiers(
        self, wanted: StagingOptions, host: str | int | None, disk: str | int | None
    ) -> tuple[HostArena, RunTier | None, torch.Tensor | None]:
        """The arena, the disk tier, and the arena as a tensor where it is no host memory."""
        if host is None:
            if disk is None:
                raise SettingsError("host", None, "a size, where there is no disk tier")
            return open_staging(wanted, self._layout, self._namespace, self._clock)
        if wanted.direct not in ("auto", "off"):
            raise SettingsError(
                "disk_direct", wanted.direct, "with host=None: else blocks lie in host memory anyway"
            )
        arena = HostArena(
            self._layout,
            wanted.slot_count,
            limit_bytes=container_limit_bytes(),
            field="host",
            huge_pages=wanted.huge_pages,
        )
        arena.touch(0)
        if disk is None:
            return arena, None, None
        try:
            tier = open_disk_tier(
                wanted.disk_dir,
                self._layout,
                self._namespace,
                capacity_bytes=wanted.disk_bytes,
                setting=wanted.setting,
                clock=self._clock,
            )
        except BaseException:
            arena.close()
            raise
        return arena, tier, None

    def _admission(self, options: LocalOptions, disk_bytes: int) -> AdmissionPolicy:
        """The policy that admits blocks to disk."""
        budget_bytes = _bytes("disk_write_budget", options.disk_write_budget)
        block_bytes, now_s = self._layout.block_bytes, self._clock()
        slots = max(1, disk_bytes // block_bytes)
        chosen = choose_admission("disk_admission", options.disk_admission, slots, now_s)
        return bound_writes("disk_write_budget", budget_bytes, chosen, block_bytes, now_s)

    def _new_copier(self, cache: DeviceCache) -> Copier:
        """A copier between this cache and the slots, wherever those are."""
        from kvbm.transfer import DeviceCopier, arena_tensor, make_copier

        if self._device_slots is None:
            arena = self.space.arena
            tensor = arena_tensor(arena.region(0), arena.slot_count, self._layout.slot_bytes)
            return make_copier(cache, tensor, by_engine=True, runtime_dir=default_runtime_dir())
        if cache.device != self._device_slots.device:
            where = f"a device that is {self._device_slots.device}, where blocks are staged"
            raise SettingsError("kv_cache", str(cache.device), where)
        return DeviceCopier(cache, self._device_slots)


def _bytes(field: str, size: str | int) -> int:
    return size if isinstance(size, int) else parse_size(field, str(size))
