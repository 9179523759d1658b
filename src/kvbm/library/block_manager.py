"""KVBM in one's own runtime: the manager without a socket, and copies in the calling thread.

The same `Space` that serves engines runs here, driven by whoever calls. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, repeat
from typing import TYPE_CHECKING

from kvbm.block import BlockKey, Tier
from kvbm.clock import Clock, monotonic
from kvbm.errors import KvbmError, SettingsError
from kvbm.hashing import Chain, chain_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.library.staging import StagingOptions, open_staging
from kvbm.manager.choices import bound_writes, choose_admission, refuse_eviction
from kvbm.manager.leases import Lease
from kvbm.manager.space import Space, SpaceOptions
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy
from kvbm.settings import container_limit_bytes, parse_size
from kvbm.tiers.contract import SlotTier
from kvbm.tiers.disk.geometry import DiskFields
from kvbm.tiers.disk.tier import open_disk_tier
from kvbm.tiers.host import HostArena

if TYPE_CHECKING:
    import torch

    from kvbm.transfer import Copier, DeviceCache

_OWNER = 0
_ARRIVAL_DEADLINE_S = 30.0
_POLL_S = 0.0002
_KV_CACHES_MAX = 4
_DISK_WRITES = ("through", "eviction")


class Hit:
    """The blocks that were found for a prompt after those that `match` skipped, leased while its block runs.

    `blocks` of them are held in a row, `tokens` tokens; `host` and `disk` say where they were found.
    """

    def __init__(self, manager: BlockManager, lease: Lease | None) -> None:
        self._manager = manager
        self._lease = lease
        self._ended = False
        sources = manager._space.counted_sources(bytes(lease.sources)) if lease is not None else b""
        self.blocks = len(sources)
        self.tokens = self.blocks * manager.layout.block_tokens
        self.host = sources.count(Tier.HOST)
        self.disk = sources.count(Tier.DISK)

    def onboard(self, kv_cache: Mapping[str, torch.Tensor], device_blocks: Sequence[int]) -> int:
        """Copy the hit into `device_blocks` of the KV cache, `[blocks]`: one per block, from the first found on.

        `kv_cache` maps layer names to tensors `[blocks, …]`. Where `match` skipped n blocks, the first device block
        gets the prompt's block n. Device blocks beyond the hit are left alone; with fewer, so many blocks are copied.

        Returns how many leading blocks of the hit arrived: blocks that come from disk and fail their check do not,
        and the caller computes from there on. Raises KvbmError after the `match` block has ended: the slots may hold
        anything by then.
        """
        if self._ended:
            raise KvbmError(
                "hit.onboard after its `with manager.match(…)` block: the blocks are no longer held"
            )
        if self._lease is None:
            return 0
        return self._manager._onboard(self._lease, kv_cache, device_blocks)

    def _end(self) -> None:
        self._ended = True


class BlockManager:
    """Keeps KV blocks in host memory and on disk for one process.

    `layout` says how large a block is; `host` and `disk` are sizes (`"4GB"`, bytes) or None; `disk_dir` is where
    the disk tier lives, and persists: a manager with the same namespace finds its blocks again. `namespace` must
    name everything that gives the bytes their meaning (see `layout.Namespace`), the weights first of all; it may be
    left out without a disk tier.

    What is kept is a matter of policies, by name, the built-in ones or those of installed packages: `eviction`
    decides what a full tier gives up (`gittins`, `lru`, …), `disk_admission` what may enter disk (`all`; `filter`,
    from the second time on; `ghost`, when offered again soon). `disk_write_budget` bounds the bytes written to disk in
    24 hours (a size; 0: no bound). `disk_write` says when a block is offered to disk: `"through"`, once host memory
    has it and on each use, or `"eviction"`, when host memory is about to give it up, or the manager is closed.

    With `host=None` the disk is the only tier. Blocks pass through a staging area of `staging` bytes: in GPU memory
    where the GPU reaches the disk itself, otherwise in host memory. `disk_direct` says how: `"auto"`, directly where
    that works, else the log says why not; `"off"`; `"GDS"` or `"GDS_MT"`, directly or not at all; `"POSIX"`, the same
    path with plain memory, for KV caches on the CPU. `device` names the GPU, "" the present one.

    Raises SettingsError when a size, a directory, a policy or a backend cannot be used.
    """

    def __init__(
        self,
        layout: BlockLayout,
        host: str | int | None = "1GB",
        disk: str | int | None = None,
        disk_dir: str = "/tmp/",
        namespace: Namespace | None = None,
        eviction: str = "gittins",
        disk_admission: str = "all",
        disk_write_budget: str | int = 0,
        disk_write: str = "through",
        staging: str | int = "512MB",
        disk_direct: str = "auto",
        device: str = "",
        clock: Clock = monotonic,
    ) -> None:
        if disk is not None and namespace is None:
            raise SettingsError(
                "namespace", None, "with a disk tier, which outlives this process: a kvbm.Namespace"
            )
        assert layout.shard_count == 1, "one process holds whole blocks"
        refuse_eviction("eviction", eviction)
        if disk_write not in _DISK_WRITES:
            raise SettingsError("disk_write", disk_write, f"one of: {', '.join(_DISK_WRITES)}")
        self.layout = layout
        self.namespace = namespace or Namespace(model="library", fields=(("layout", repr(layout)),))
        self._fingerprint = self.namespace.fingerprint
        self.metrics = Metrics()
        self._clock = clock
        self._numbers = count(1)
        self._copiers: dict[tuple[object, ...], Copier] = {}
        self._device_layout = ""
        field, size = ("staging", staging) if host is None else ("host", host)
        slots = _bytes(field, size) // layout.block_bytes
        if slots < 1:
            raise SettingsError(field, size, f"at least one block of {layout.block_bytes} bytes")
        disk_bytes = 0 if disk is None else _bytes("disk", disk)
        admission = self._admission(
            disk_admission, _bytes("disk_write_budget", disk_write_budget), disk_bytes
        )
        options = SpaceOptions(
            staging=host is None, eviction=eviction, write_on_eviction=disk_write == "eviction"
        )
        wanted = StagingOptions(
            slot_count=slots,
            disk_dir=disk_dir,
            disk_bytes=disk_bytes,
            fields=DiskFields(root="disk_dir", size="disk", size_as_set=disk, unowned=""),
            direct=disk_direct,
            device=device,
        )
        arena, tier, self._device_slots = self._open_tiers(wanted, host, disk)
        try:
            self._space = Space(
                layout, arena, tier, admission, self.metrics, clock, lambda lease: None, options
            )
        except BaseException:
            if tier is not None:
                tier.close(keep=True)
            arena.close()
            raise

    def _open_tiers(
        self, wanted: StagingOptions, host: str | int | None, disk: str | int | None
    ) -> tuple[HostArena, SlotTier | None, torch.Tensor | None]:
        """The arena, the disk tier, and the arena as a tensor where it is no host memory."""
        if host is None:
            if disk is None:
                raise SettingsError("host", None, "a size, where there is no disk tier")
            return open_staging(wanted, self.layout, self.namespace, self._clock)
        if wanted.direct not in ("auto", "off"):
            raise SettingsError(
                "disk_direct", wanted.direct, "with host=None: else blocks lie in host memory anyway"
            )
        arena = HostArena(self.layout, wanted.slot_count, limit_bytes=container_limit_bytes(), field="host")
        arena.touch(0)
        if disk is None:
            return arena, None, None
        try:
            tier = open_disk_tier(
                wanted.disk_dir,
                self.layout,
                self.namespace,
                capacity_bytes=wanted.disk_bytes,
                fields=wanted.fields,
                clock=self._clock,
            )
        except BaseException:
            arena.close()
            raise
        return arena, tier, None

    def _admission(self, name: str, budget_bytes: int, disk_bytes: int) -> AdmissionPolicy:
        """What may enter disk."""
        block_bytes, now_s = self.layout.block_bytes, self._clock()
        chosen = choose_admission("disk_admission", name, max(1, disk_bytes // block_bytes), now_s)
        return bound_writes("disk_write_budget", budget_bytes, chosen, block_bytes, now_s)

    def __enter__(self) -> BlockManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def match(self, tokens: Sequence[int] | Chain, extras: bytes = b"", skip: int = 0) -> Iterator[Hit]:
        """The longest prefix of `tokens` (`[n]`, or their Chain) that is held, leased while inside.

        `extras` separates what must never meet: a tenant's salt, an adapter's digest. `skip` is the number of the
        prompt's leading blocks that the device holds itself: the hit begins after them, and nothing is read from disk
        for them. They need not be held here.

        Raises SettingsError for a negative `skip`, and KvbmError for a chain of another namespace, block size or
        `extras`.
        """
        if skip < 0:
            raise SettingsError("skip", skip, "the number of leading blocks that the device holds")
        keys = self._keys(tokens, extras)
        number = next(self._numbers)
        self._space.pump()
        lease = self._space.lookup(_OWNER, number, keys, min(skip, len(keys)))
        hit = Hit(self, lease)
        try:
            yield hit
        finally:
            hit._end()
            self._space.release(_OWNER, number)

    def offload(
        self,
        tokens: Sequence[int] | Chain,
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int],
        extras: bytes = b"",
    ) -> int:
        """Keep the full blocks of `tokens`, which lie in `device_blocks` of the KV cache; how many were copied.

        `tokens` are all from the sequence's start on, `[n]`, or their Chain; `device_blocks`, `[blocks]`, are as many
        of its leading blocks as are to be kept. Blocks that are held already are not copied again; what finds no room
        is left out. Raises KvbmError for a chain of another namespace, block size or `extras`.
        """
        keys = self._keys(tokens, extras)[: len(device_blocks)]
        self._space.pump()
        number = next(self._numbers)
        # A sequence is offered again each time it has grown: step over what is held in one go.
        found = self._space.host_pool.find_all(keys)
        held = found.index(None) if None in found else len(keys)
        answer = self._space.reserve(_OWNER, number, keys[held - 1] if held else None, keys[held:])
        pairs = [(device_blocks[i], slot) for i, slot in enumerate(answer, held) if slot >= 0]
        if not pairs:
            return 0
        failed: Sequence[int] = range(len(pairs))
        try:
            self._copier_for(kv_cache).store(pairs)
            failed = ()
        finally:
            self._space.commit(_OWNER, number, failed)
        self._space.pump()  # what has to go for the next call is written meanwhile
        return len(pairs)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was offered to the disk tier has reached it; False when it takes longer than `timeout_s`."""
        deadline_s = self._clock() + timeout_s
        while self._space.busy:
            if self._clock() >= deadline_s:
                return False
            self._space.pump()
            time.sleep(_POLL_S)
        return True

    def clear(self, tier: str = "") -> int:
        """Drop what is not in use, of the tier `host` or `disk`, or of both; how many blocks were dropped."""
        return self._space.clear(tier)[0]

    def close(self) -> None:
        """Write what waits for disk and release everything. What is on disk stays."""
        self.flush(timeout_s=5.0)
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()
        self._space.close(keep=True)

    def _keys(self, tokens: Sequence[int] | Chain, extras: bytes) -> list[BlockKey]:
        size = self.layout.block_tokens
        if not isinstance(tokens, Chain):
            per_block = repeat(extras) if extras else None
            return chain_keys(self._fingerprint, tokens, size, per_block)
        if (tokens.fingerprint, tokens.block_tokens) != (self._fingerprint, size):
            raise KvbmError("a chain of another namespace or block size: its keys mean nothing here")
        if extras not in (b"", tokens.extras):
            raise KvbmError("a chain has the extras that it was made with; these are others")
        return tokens.keys

    def _onboard(
        self, lease: Lease, kv_cache: Mapping[str, torch.Tensor], device_blocks: Sequence[int]
    ) -> int:
        begun = min(len(lease.slots), len(device_blocks))
        self.metrics.add("kvbm_matched_tokens", begun * self.layout.block_tokens)
        deadline_s = self._clock() + _ARRIVAL_DEADLINE_S
        while not lease.final and self._clock() < deadline_s:
            self._space.pump()
            if not lease.final:
                time.sleep(_POLL_S)
        arrived = min(lease.ready, len(device_blocks))
        pairs = list(zip(device_blocks[:arrived], lease.slots[:arrived], strict=True))
        if pairs:
            self._copier_for(kv_cache).load(pairs)
            sources = self._space.counted_sources(bytes(lease.sources[:arrived]))
            self.metrics.add("kvbm_onboard_blocks_h2d", sources.count(Tier.HOST))
            self.metrics.add("kvbm_onboard_blocks_d2d", sources.count(Tier.DISK))
            size = arrived * self.layout.shard_bytes
            self.metrics.add("kvbm_transfer_bytes_total", size, source="host", target="device")
        return arrived

    def _copier_for(self, kv_cache: Mapping[str, torch.Tensor]) -> Copier:
        """The copier between this KV cache and the arena, made once per set of tensors; the oldest of a few is dropped.

        Blocks are bytes: a cache whose dimensions lie in another order would get them back shuffled, so all caches
        of one manager must be laid out alike.
        """
        from kvbm.transfer import DeviceCache

        identity = tuple((name, tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in kv_cache.items())
        copier = self._copiers.get(identity)
        if copier is None:
            cache = DeviceCache.from_tensors(kv_cache, next(iter(kv_cache.values())).shape[0])
            if cache.shard_bytes != self.layout.shard_bytes:
                raise SettingsError(
                    "layout.shard_bytes",
                    self.layout.shard_bytes,
                    f"{cache.shard_bytes}, the bytes of a block over the {len(kv_cache)} layers of this KV cache",
                )
            if cache.description != (self._device_layout or cache.description):
                raise SettingsError("kv_cache", cache.description, self._device_layout)
            self._device_layout = cache.description
            # On CUDA a copier page-locks the slots, which only one at a time can.
            kept_max = _KV_CACHES_MAX - 1 if cache.device.type != "cuda" else 0
            while len(self._copiers) > kept_max:
                self._copiers.pop(next(iter(self._copiers))).close()
            copier = self._copiers[identity] = self._new_copier(cache)
        return copier

    def _new_copier(self, cache: DeviceCache) -> Copier:
        """A copier between this cache and the slots, wherever those are."""
        from kvbm.transfer import DeviceCopier, arena_tensor, make_copier

        if self._device_slots is None:
            arena = self._space.arena
            tensor = arena_tensor(arena.region(0), arena.slot_count, self.layout.slot_bytes)
            return make_copier(cache, tensor, by_engine=True)
        if cache.device != self._device_slots.device:
            where = f"a device that is {self._device_slots.device}, where blocks are staged"
            raise SettingsError("kv_cache", str(cache.device), where)
        return DeviceCopier(cache, self._device_slots)


def _bytes(field: str, size: str | int) -> int:
    return size if isinstance(size, int) else parse_size(field, size)
