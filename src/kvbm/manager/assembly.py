"""Settings → spaces: one space per namespace, each with its share of the configured bytes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.clock import Clock
from kvbm.errors import ManagerRefused, SettingsError
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.choices import bound_writes, choose_admission, for_each, refuse_eviction
from kvbm.manager.closing import close_spaces, drop_space
from kvbm.manager.disk_openings import DiskOpenings
from kvbm.manager.gauges import count_in_bulk, forget_blocks
from kvbm.manager.guarded_space import GuardedSpace
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.leases import Lease
from kvbm.manager.namespace_labels import NamespaceLabels
from kvbm.manager.space import Space
from kvbm.manager.write_behind import RemoteRules
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy, AdmitAll, make_policy
from kvbm.settings import (
    Settings,
    admission_name,
    admission_notices,
    container_limit_bytes,
    disk_slots,
    host_memory_field,
    host_slots,
    request_notices,
    staging_slots,
    variable,
)
from kvbm.tiers.disk.geometry import DiskSetting
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from kvbm.tiers.host import HostArena, refuse_beyond_memory
from kvbm.tiers.remote.contract import RemoteTier

if TYPE_CHECKING:
    from kvbm.manager.remote_opening import RemoteOpening

log = logging.getLogger("kvbm.manager")

STAGING_BLOCKS_MIN = 4
"""With fewer, one slow block would delay all others on their way to disk and back."""


def _load_modules(eviction: str) -> None:
    """Import what the first engine needs, before the loop turns: numpy and a policy take 60 ms."""
    for name in ("kvbm.tiers.generations", "kvbm.manager.slot_table", "kvbm.policy.favours"):
        importlib.import_module(name)
    make_policy(eviction, 1)


def refuse_policies(settings: Settings, now_s: float) -> None:
    """Raise SettingsError for an eviction or admission policy that is not known or cannot be made."""
    refuse_eviction(variable("eviction"), settings.eviction)
    choose_admission(variable("disk_admission"), admission_name(settings), 1, now_s)
    if not settings.remote_on:  # where there is a store, `RemoteOpening` checks it
        choose_admission(variable("remote_admission"), settings.remote_admission, 1, now_s)


class SpaceTable:
    """The spaces of one manager by fingerprint; at most `namespaces_max`, each with an equal share of every tier."""

    def __init__(
        self,
        settings: Settings,
        namespaces_max: int,
        metrics: Metrics,
        clock: Clock,
        on_progress: Callable[[Lease], None],
        peers: Callable[[Namespace, BlockLayout], RemoteTier] | None = None,
    ) -> None:
        """`peers` makes the tier of a namespace's blocks in other nodes' host memory.

        Raises SettingsError for an eviction or admission policy that is not known or cannot be made."""
        assert namespaces_max > 0
        refuse_policies(settings, clock())
        _load_modules(settings.eviction)
        self._remote = _remote_opening(settings, clock)
        self.settings = settings
        self.namespaces_max = namespaces_max
        self._metrics = metrics
        self._clock = clock
        self._on_progress = on_progress
        self._peers = peers
        self._spaces: dict[bytes, tuple[Namespace, Space]] = {}
        self._openings = DiskOpenings(self._open_disk, clock)
        self._labels = NamespaceLabels()
        # The largest request, in blocks, for which each was compared with its memory: every rank asks.
        self._advised: dict[bytes, int] = {}

    @property
    def publishes(self) -> bool:
        """Whether what the tiers hold is announced to routers, for which engines are to say what blocks are."""
        return self.settings.events_endpoint is not None

    def __iter__(self) -> Iterator[tuple[Namespace, Space]]:
        return iter(list(self._spaces.values()))

    def named(self) -> list[tuple[str, Space]]:
        """Every space with its name in metrics."""
        return [(self._labels.name(namespace), space) for namespace, space in self]

    def namespace_of(self, space: Space) -> Namespace:
        """The namespace of one of ours."""
        return next(namespace for namespace, candidate in self._spaces.values() if candidate is space)

    def obtain(
        self, namespace: Namespace, layout: BlockLayout, request_blocks: int, events: bool = False
    ) -> Space:
        """The namespace's space, made on first use.

        With `events`, and where we publish some, the disk keeps what engines say of blocks. Host memory for fewer than
        `request_blocks` draws a warning: the run found for a request ends where it is full.
        Raises ManagerRefused when the manager is full of other namespaces, SettingsError when a tier cannot be made.
        """
        known = self._spaces.get(namespace.fingerprint)
        if known is not None:
            space = known[1]
            if space.layout != layout:
                raise ManagerRefused(f"block layout {layout} differs from this namespace's {space.layout}")
            self._advise(namespace, space, request_blocks)
            return space
        self._refuse_beyond(namespace)
        space = self._build(namespace, layout, events)
        self._spaces[namespace.fingerprint] = (namespace, space)
        self._advise(namespace, space, request_blocks)
        return space

    def preparing(self, namespace: Namespace, layout: BlockLayout, events: bool) -> Iterator[object]:
        """Before `obtain`: open the disk of a namespace that has no space yet, while others have their turns.

        It is waited for `disk_openings.OPEN_S_MAX`; then the space does without, until it is open. Raises as `obtain`.
        """
        if namespace.fingerprint not in self._spaces and self.settings.disk_on:
            self._refuse_beyond(namespace)
            room = self.namespaces_max - len(self._spaces)
            yield from self._openings.wait(namespace, layout, events or self.publishes, room)

    def _refuse_beyond(self, namespace: Namespace) -> None:
        """Raise ManagerRefused for a namespace where there are as many others as are served, those included whose disk
        is being opened."""
        held = [each for each, _ in self._spaces.values()]
        held += [each for each in self._openings.awaited() if each.fingerprint != namespace.fingerprint]
        if len(held) >= self.namespaces_max:
            resident = held[0]
            raise ManagerRefused(
                f"namespace={namespace.short!r} ({namespace.model}) cannot be served: this manager holds "
                f"{resident.short!r} ({resident.model}) and accepts {self.namespaces_max} namespace(s); "
                f"{namespace.difference(resident)}; start it with --namespaces {self.namespaces_max + 1}, "
                "or start another manager"
            )

    def close(self, keep: bool) -> None:
        """Close and forget all spaces within `closing.CLOSE_S_MAX` together."""
        self._openings.close(keep)
        spaces = [space for _, space in self]
        close_spaces(spaces, keep)
        for space in spaces:
            self._forget(space)

    def drop(self, space: Space, keep: bool) -> None:
        """Close a space and forget it. Nothing is waited for: what is queued is not written."""
        drop_space(space, keep)
        self._forget(space)

    def _forget(self, space: Space) -> None:
        namespace = self.namespace_of(space)
        fingerprint, label = namespace.fingerprint, self._labels.name(namespace)
        del self._spaces[fingerprint]
        self._advised.pop(fingerprint, None)
        count_in_bulk(label, space, self._metrics)
        forget_blocks(label, space, self._metrics)

    def _advise(self, namespace: Namespace, space: Space, request_blocks: int) -> None:
        """Warn where one request may have more blocks than the host memory that all of them go through."""
        if request_blocks > self._advised.get(namespace.fingerprint, 0):
            self._advised[namespace.fingerprint] = request_blocks
            layout = space.layout
            for line in request_notices(
                self.settings,
                space.arena.slot_count,
                layout.block_bytes,
                0 if layout.groups else layout.block_tokens,
                request_blocks,
                self.namespaces_max,
            ):
                log.warning("%s", line)

    def _build(self, namespace: Namespace, layout: BlockLayout, events: bool) -> Space:
        settings, share = self.settings, self.namespaces_max
        staging = settings.disk_on and not settings.host_on
        if staging:
            _refuse_small_staging(settings, layout, share)
            slots = staging_slots(settings, layout.block_bytes) // share
        else:
            slots = host_slots(settings, layout.block_bytes) // share
            if slots < 1:
                value = settings.host_blocks or (settings.host_bytes or 0) / 1e9
                accepted = f"at least one block of {layout.block_bytes} bytes{for_each(share)}"
                raise SettingsError(host_memory_field(settings), value, accepted)
        admission = self._make_admission(layout)
        for odd, remedy in admission_notices(settings, layout.block_bytes):
            log.warning("%s; %s", odd, remedy)
        # The container's limit, not the memory free now: workers hold that of a manager that died until the next one
        # welcomes them.
        limit_bytes = container_limit_bytes()
        field = host_memory_field(settings)
        # For all namespaces together: the last one to come must not end them all.
        refuse_beyond_memory(slots * layout.block_bytes * share, limit_bytes, field)
        with contextlib.ExitStack() as undo:
            arena = HostArena(
                layout,
                slots,
                min(8, os.cpu_count() or 1),
                field=field,
                huge_pages=settings.huge_pages,
            )
            undo.callback(arena.close)
            medium, keeps_facts = None, events or self.publishes
            if settings.disk_on:
                medium, keeps_facts = self._openings.take(namespace, layout, keeps_facts)
                undo.callback(medium.close, keep=True, deadline_s=0.0)
            remotes = self._open_remotes(namespace, layout)
            for tier, _, _ in remotes:
                undo.callback(tier.close)
            options = SpaceOptions(
                staging=staging,
                eviction=settings.eviction,
                in_flight_max=settings.max_concurrent_transfers * settings.max_transfer_batch_size,
                keeps_facts=keeps_facts,
                salt_share=settings.salt_share,
            )
            # Raises for an installed policy that cannot be made of this size.
            space = GuardedSpace(
                namespace.short,
                layout,
                arena,
                medium,
                admission,
                self._metrics,
                self._clock,
                self._on_progress,
                options,
                remotes,
            )
            undo.pop_all()
        _log_opened(namespace, space)
        return space

    def _open_remotes(
        self, namespace: Namespace, layout: BlockLayout
    ) -> list[tuple[RemoteTier, RemoteRules, AdmissionPolicy]]:
        """Other nodes' memory, which is nearer, and then the store; none for an ephemeral namespace: nobody else could
        ever ask for its blocks."""
        if namespace.ephemeral:
            return []
        remotes = list[tuple[RemoteTier, RemoteRules, AdmissionPolicy]]()
        if self._peers is not None:
            remotes.append((self._peers(namespace, layout), RemoteRules(writes=False), AdmitAll()))
        if self._remote is not None:
            try:
                remotes += self._remote.open(namespace, layout, self.namespaces_max)
            except BaseException:
                for tier, _, _ in remotes:
                    tier.close()
                raise
        return remotes

    def _make_admission(self, layout: BlockLayout) -> AdmissionPolicy:
        """The admission policy of one namespace's disk tier, within its share of the write budget."""
        settings, share, size = self.settings, self.namespaces_max, layout.block_bytes
        slots, now_s = disk_slots(settings, size) // share, self._clock()
        admission = choose_admission(
            variable("disk_admission"), admission_name(settings), max(slots, 1), now_s
        )
        budget = settings.disk_write_budget_bytes if settings.disk_on else 0
        return bound_writes(variable("disk_write_budget_bytes"), budget, admission, size, now_s, share)

    def _open_disk(self, namespace: Namespace, layout: BlockLayout, keeps_facts: bool) -> DiskTier:
        settings, share = self.settings, self.namespaces_max
        blocks = settings.disk_blocks // share if settings.disk_blocks else None
        size = settings.disk_bytes // share if settings.disk_bytes and not blocks else None
        setting = DiskSetting(
            root=variable("disk_dir"),
            size=variable("disk_bytes"),
            as_set=settings.disk_blocks or f"{(settings.disk_bytes or 0) / 1e9:g}",
            blocks=variable("disk_blocks"),
            unowned=variable("disk_unowned_bytes"),
            tier_count=share,
        )
        return open_disk_tier(
            settings.disk_dir,
            layout,
            namespace,
            capacity_bytes=size,
            capacity_blocks=blocks,
            o_direct=settings.disk_o_direct,
            zerofill_fallback=settings.disk_zerofill_fallback,
            persist=settings.disk_persist and not namespace.ephemeral,
            unowned_bytes=settings.disk_unowned_bytes,
            setting=setting,
            keeps_facts=keeps_facts,
            notes_dir=Path(settings.runtime_dir),
            clock=self._clock,
            wait=False,
        )


def _log_opened(namespace: Namespace, space: Space) -> None:
    layout, slots = space.layout, space.arena.slot_count
    on_disk = space.disk.medium.slot_count if space.disk is not None else 0
    log.info(
        "namespace %s (%s): block %d tokens, %d bytes in %d shard(s); %s %d blocks (%.2f GB); disk %s; remote %s",
        namespace.short,
        namespace.model,
        layout.block_tokens,
        layout.block_bytes,
        layout.shard_count,
        "staging" if space.options.staging else "host",
        slots,
        slots * layout.block_bytes / 1e9,
        f"{on_disk} blocks ({on_disk * layout.block_bytes / 1e9:.2f} GB)" if on_disk else "off",
        ", ".join(str(remote.tier.describe().get("place", "on")) for remote in space.remotes) or "off",
    )


def _remote_opening(settings: Settings, clock: Clock) -> RemoteOpening | None:
    """What opens remote tiers; None where there are none. Raises SettingsError."""
    if not settings.remote_on:
        return None
    from kvbm.manager.remote_opening import RemoteOpening  # its packages are not everywhere, and take a while

    return RemoteOpening(settings, clock)


def _refuse_small_staging(settings: Settings, layout: BlockLayout, share: int) -> None:
    """Refuse a staging area too small to be used. A request may be larger: its run ends where there is no more room."""
    needed_bytes = STAGING_BLOCKS_MIN * layout.block_bytes * share
    if settings.staging_bytes < needed_bytes:
        blocks = f"{STAGING_BLOCKS_MIN} blocks of {layout.block_bytes} bytes{for_each(share)}"
        accepted = f"at least {needed_bytes / 1e9:.9f} GB: {blocks}"
        raise SettingsError(variable("staging_bytes"), f"{settings.staging_bytes / 1e9:g}", accepted)
