"""The library: KV blocks of one's own runtime, kept in this process or at a manager that others share.

Not thread-safe: one thread owns a `BlockManager`, and copies are made in it. A forked process makes its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any

from kvbm.block import BlockKey, Tier
from kvbm.client.mirror import Mirror
from kvbm.clock import Clock, monotonic
from kvbm.errors import KvbmError, SettingsError
from kvbm.grouping import Grouping
from kvbm.hashing import Chain, EngineKeys, chain_keys
from kvbm.hints import ClientHint, latest, read_hint, tenant_digest
from kvbm.layout import BlockLayout, Namespace
from kvbm.library.attachment import Attachment
from kvbm.library.backend import Backend, Run, Stored
from kvbm.library.hit import Hit
from kvbm.library.layer_load import LayerLoad
from kvbm.library.local import LocalOptions, LocalSpace
from kvbm.library.remote import SharedSpace
from kvbm.library.tables import Table, to_keep
from kvbm.observe.metrics import Metrics
from kvbm.settings import settings_of_arguments, without_credentials

if TYPE_CHECKING:
    import torch


class BlockManager:
    """Keeps KV blocks in host memory, on disk and in a store, for this process; `connect` shares those of a manager.

    `layout` says how large a block is; `host` and `disk` are sizes (`"4GB"`, bytes) or None; `disk_dir` is where
    the disk tier lives, and persists: a manager with the same namespace finds its blocks again. `namespace` must
    name everything that gives the bytes their meaning (see `layout.Namespace`), the weights first of all; it may be
    left out without a disk tier and a store.

    Policies decide which blocks are kept. They go by name, the built-in ones and those of installed packages:
    `eviction` decides what a full tier gives up (`gittins`, `lru`, …), `disk_admission` what may enter disk (`all`;
    `filter`, from the second time on; `ghost`, when offered again soon). `disk_write_budget` bounds the bytes written
    to disk in 24 hours (a size; 0: no bound).

    With `host=None` the disk is the only tier. Blocks pass through a staging area of `staging` bytes: in GPU memory
    where the GPU reaches the disk itself, otherwise in host memory. `disk_direct` says how: `"auto"`, directly where
    that works, else the log says why not; `"off"`; `"GDS"` or `"GDS_MT"`, directly or not at all; `"POSIX"`, the same
    path with plain memory, for KV caches on the CPU. `device` names the GPU, "" the present one.

    `remote` is the URL of a store that other processes and nodes share, in all forms that a manager takes: what one
    of them wrote, each finds that has the same namespace. It lies below host memory and the disk. What lies there is
    listed at the start, for at most as long as a read may take; later a call in which it is due looks for what came
    since, `refresh` too. The arguments `remote_…` are the settings of a manager of the same names, with their defaults:
    blocks are written in packs, after `remote_linger_s` seconds, by `flush` or by `close`; a read that takes longer
    than `remote_deadline_ms` is a miss; `remote_ttl_hours` and `remote_bytes` (a size; None: no bound) say what is
    removed, by everyone with `remote_collect`; `remote_write_bytes` bounds what is written in an hour (a size; 0: no
    bound). With `remote_write=False` nothing is written. A store that is away is a miss, and no error.

    `huge_pages` asks the kernel for huge pages of host memory, or, when False, for none; `DYN_KVBM_HUGE_PAGES` says
    nothing here.

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
        staging: str | int = "512MB",
        disk_direct: str = "auto",
        device: str = "",
        huge_pages: bool = True,
        clock: Clock = monotonic,
        remote: str | None = None,
        remote_write: bool = True,
        remote_admission: str = "all",
        remote_linger_s: int = 10,
        remote_deadline_ms: int = 2000,
        remote_ttl_hours: int = 168,
        remote_bytes: str | int | None = None,
        remote_write_bytes: str | int = 0,
        remote_collect: bool = True,
        remote_key_file: str | None = None,
    ) -> None:
        if (disk is not None or remote is not None) and namespace is None:
            outlives = "with a disk tier or a store, which outlives this process"
            raise SettingsError("namespace", None, f"{outlives}: a kvbm.Namespace")
        store = settings_of_arguments(
            {
                "remote": remote,
                "remote_write": remote_write,
                "remote_admission": remote_admission,
                "remote_linger_s": remote_linger_s,
                "remote_deadline_ms": remote_deadline_ms,
                "remote_ttl_hours": remote_ttl_hours,
                "remote_bytes": remote_bytes,
                "remote_write_bytes": remote_write_bytes,
                "remote_collect": remote_collect,
                "remote_key_file": remote_key_file,
            }
        )
        options = LocalOptions(
            host=host,
            disk=disk,
            disk_dir=disk_dir,
            eviction=eviction,
            disk_admission=disk_admission,
            disk_write_budget=disk_write_budget,
            staging=staging,
            disk_direct=disk_direct,
            device=device,
            huge_pages=huge_pages,
            store=store if store.remote_on else None,
        )
        self._begin(layout, namespace or Namespace(model="library", fields=(("layout", repr(layout)),)))
        self._backend: Backend | None = LocalSpace(options, layout, self.namespace, self.metrics, clock)

    @classmethod
    def connect(
        cls,
        socket: str,
        layout: BlockLayout,
        namespace: Namespace,
        peer_uids: Iterable[int] = (),
        join_timeout_s: float = 5.0,
        reply_timeout_s: float = 1.0,
        clock: Clock = monotonic,
        remote: None = None,
    ) -> BlockManager:
        """A block manager that shares the blocks of a running `kvbm manager`, which listens at the path `socket`.

        Its tiers and policies are those of that manager; blocks are shared with every client of the same namespace,
        which must name the order of the KV cache's dimensions too: processes cannot compare it. `peer_uids` are the
        users that may serve there, besides our own and root. A `remote` tier is the manager's too: one that is named
        here is refused. Raises ManagerUnavailable when there is none within
        `join_timeout_s`, ManagerRefused when it says no, ManagerUntrusted for another user's, and SettingsError for a
        path that no socket can have.

        Should the manager go, nothing is found and nothing kept, and a warning says so; calls try to join the next one,
        and go on without it where there is none. No answer is waited for longer than `reply_timeout_s`.
        """
        if remote is not None:
            raise SettingsError(
                "remote",
                without_credentials(str(remote)),
                f"nothing, at a shared manager, whose tiers count: give it to the manager at {socket} (--remote)",
            )
        attachment = Attachment.at(socket, peer_uids)
        return cls.attach(attachment, layout, namespace, join_timeout_s, reply_timeout_s, clock)

    @classmethod
    def attach(
        cls,
        attachment: Attachment,
        layout: BlockLayout,
        namespace: Namespace,
        join_timeout_s: float = 5.0,
        reply_timeout_s: float = 1.0,
        clock: Clock = monotonic,
        mirror: Mirror | None = None,
    ) -> BlockManager:
        """`connect`, for an engine that moves its bytes itself: it may share a manager, or start a private one.

        `mirror` is kept up to date with what the manager holds, by `refresh` and by every other call.
        """
        manager = cls.__new__(cls)
        manager._begin(layout, namespace)
        manager._backend = SharedSpace(
            attachment, layout, namespace, join_timeout_s, reply_timeout_s, clock, mirror
        )
        return manager

    def _begin(self, layout: BlockLayout, namespace: Namespace) -> None:
        assert layout.shard_count == 1, "one process holds whole blocks"
        self.layout = layout
        self.grouping = Grouping(layout.groups) if layout.groups else None
        self.namespace = namespace
        self._fingerprint = namespace.fingerprint
        self.metrics = Metrics()
        self._pid = os.getpid()

    @property
    def backend(self) -> Backend:
        """Where the blocks are kept. Raises KvbmError once it is closed, and in a process that was forked from ours.

        A forked process has the same memory and sessions: it would write over our blocks, and read our answers.
        """
        if self._backend is None:
            raise KvbmError("this block manager is closed")
        if os.getpid() != self._pid:
            raise KvbmError(
                f"this block manager belongs to process {self._pid}: make another one after the fork"
            )
        return self._backend

    def __enter__(self) -> BlockManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def match(
        self,
        tokens: Sequence[int] | Chain | EngineKeys,
        extras: bytes = b"",
        skip: int = 0,
        hint: Mapping[str, Any] | None = None,
    ) -> Iterator[Hit]:
        """The longest prefix of `tokens` (`[n]`, their Chain, or the keys that an engine made of them) that is held,
        leased while inside.

        `extras` keeps sequences apart that must never share blocks: a tenant's salt, an adapter's digest. `skip` is the
        number of the prompt's leading blocks that the device holds itself: the hit begins after them, and nothing is
        read from disk for them. They need not be held here. `hint` says what is known of the prompt's
        future (see `hints`); for it the request ends with the `with` block.

        Raises SettingsError for a negative `skip`, and KvbmError for a chain of another namespace, block size or
        `extras`.
        """
        if skip < 0:
            raise SettingsError("skip", skip, "the number of leading blocks that the device holds")
        backend = self.backend
        told = tokens if isinstance(tokens, EngineKeys) else None
        read = read_hint(hint)
        asker, keys = ClientHint(_tenant(extras), read.hint, read.verdicts), self._keys(tokens, extras)
        run, verdicts = backend.lookup(keys, skip, told, asker)
        hit = Hit(self, run, skip, latest(read.verdicts, verdicts))
        try:
            yield hit
        finally:
            hit.end()
            if run is not None:
                backend.release(run)
            if read.verdicts and keys:
                backend.finished(keys[-1])

    def onboard_by_layer(
        self, hits: Sequence[tuple[Hit, Sequence[int]]], kv_cache: Mapping[str, torch.Tensor]
    ) -> LayerLoad | None:
        """A load of each hit's first blocks into these device blocks, one layer after the other (one group only).

        For an engine that computes with the first layers while the others are on their way. None where not all of these
        blocks lie in host memory: nothing waits for a disk here. The hits stay held until the load has ended.
        """
        wanted = list[tuple[Run, Sequence[int]]]()
        for hit, blocks in hits:
            hit.must_be_held()
            if hit.run is None or len(blocks) > hit.blocks or self.grouping is not None:
                return None
            wanted.append((hit.run, blocks))
        return self.backend.load_by_layer(wanted, kv_cache) if wanted else None

    def offload(
        self,
        tokens: Sequence[int] | Chain | EngineKeys,
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int] | Sequence[Table],
        extras: bytes = b"",
    ) -> int:
        """Keep the full blocks of `tokens`, which lie in `device_blocks` of the KV cache; how many were copied.

        `tokens` are all from the sequence's start on, `[n]`, or their Chain; `device_blocks`, `[blocks]`, are as many
        of its leading blocks as are to be kept. Blocks that are held already are not copied again; blocks that find no
        room are left out. Raises KvbmError for a chain of another namespace, block size or `extras`.

        Of a layout with several groups `device_blocks` has a list for each group, as in `Hit.onboard`. Kept are the
        blocks of all tokens up to where the shortest list ends, and of the other groups what they need behind that: so
        call it where prompts may go on from, at the end of a prompt and of an answer.
        """
        return self.offload_each(tokens, kv_cache, device_blocks, extras).count(Stored.COPIED)

    def offload_each(
        self,
        tokens: Sequence[int] | Chain | EngineKeys,
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int] | Sequence[Table],
        extras: bytes = b"",
    ) -> list[Stored]:
        """`offload`, which says what became of each block that was to be kept, in order."""
        keys, tenant = self._keys(tokens, extras), _tenant(extras)
        if self.grouping is None:
            wanted: Sequence[int] = device_blocks  # type: ignore[assignment]  # no tables
            parent = BlockKey(tokens.parent) if isinstance(tokens, EngineKeys) and tokens.parent else None
            return self.backend.store(keys[: len(wanted)], kv_cache, wanted, parent, tenant=tenant)
        outcomes: list[Stored] = []
        for part in to_keep(self.grouping, keys, device_blocks):  # type: ignore[arg-type]  # tables
            outcomes += self.backend.store(
                part.keys, kv_cache, part.device_blocks, part.parent, part.groups, tenant
            )
        return outcomes

    @contextmanager
    def staying(self) -> Iterator[None]:
        """While inside, another manager is not joined in place of one that has gone, so that hits keep their memory.

        Keep it short: nothing is found and nothing kept meanwhile.
        """
        backend = self.backend
        backend.stays += 1
        try:
            yield
        finally:
            backend.stays -= 1

    def descriptors(self) -> tuple[int, ...]:
        """What becomes readable when a shared manager has said something: then, or once a second, call `refresh`."""
        return self.backend.descriptors()

    def refresh(self) -> None:
        """Take in what a shared manager has said, and join one that came back. Waits at most for its welcome."""
        self.backend.refresh()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until no block is on its way to the disk tier or the store, where what waits for the next blocks of its
        chain is written at once; False when it takes longer than `timeout_s`.

        At a shared manager the blocks of other clients count too, and it is False without the manager.
        """
        return self.backend.flush(timeout_s)

    def clear(self, tier: str = "") -> int:
        """Drop the blocks that are not in use, of the tier `host` or `disk`, or of both; how many blocks were dropped.
        What lies in a store stays: others use it.

        At a shared manager nothing is dropped while another client has the same namespace, and ManagerUnavailable is
        raised without the manager.
        """
        return self.backend.clear(tier)

    def status(self) -> dict[str, object]:
        """The namespace, and its tiers with their blocks: how many there are, and how many are in which state.

        Empty while a shared manager cannot be reached.
        """
        return self.backend.status()

    def close(self) -> None:
        """Write the blocks that wait for disk or the store, and release everything. Blocks there stay, and those at a
        shared manager. One that does not answer is waited for some seconds.

        Twice is no error.
        """
        if self._backend is not None:
            backend, self._backend = self.backend, None
            backend.close()

    def _keys(self, tokens: Sequence[int] | Chain | EngineKeys, extras: bytes) -> list[BlockKey]:
        size = self.layout.block_tokens
        if isinstance(tokens, EngineKeys):
            if extras:
                raise KvbmError("an engine's keys cover all extras already: give none")
            return tokens.keys
        if not isinstance(tokens, Chain):
            per_block = repeat(extras) if extras else None
            return chain_keys(self._fingerprint, tokens, size, per_block)
        if (tokens.fingerprint, tokens.block_tokens) != (self._fingerprint, size):
            raise KvbmError("a chain of another namespace or block size: its keys mean nothing here")
        if extras not in (b"", tokens.extras):
            raise KvbmError("a chain has the extras that it was made with; these are others")
        return tokens.keys

    def onboard_run(
        self,
        run: Run,
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int],
        first: int = 0,
        of_prompt: int | None = None,
    ) -> int:
        """As `hit.Holder`."""
        begun = min(len(run.sources) - first, len(device_blocks)) if of_prompt is None else of_prompt
        self.metrics.add("kvbm_matched_tokens", begun * self.layout.block_tokens)
        arrived = self.backend.load(run, kv_cache, device_blocks, first)
        if arrived:
            sources = run.sources[first : first + arrived]
            self.metrics.add("kvbm_onboard_blocks_h2d", sources.count(Tier.HOST))
            self.metrics.add("kvbm_onboard_blocks_d2d", sources.count(Tier.DISK))
            self.metrics.add("kvbm_onboard_blocks_o2d", sources.count(Tier.REMOTE))
            size = arrived * self.layout.shard_bytes
            self.metrics.add("kvbm_transfer_bytes_total", size, source="host", target="device")
        return arrived


def _tenant(extras: bytes) -> str:
    """Who sequences with these extras belong to, as shares and sessions count them."""
    return tenant_digest(extras) if extras else ""
