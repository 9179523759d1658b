"""Disks that are opened for the first engine of a namespace, before it has a space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvbm.block import Outcome
from kvbm.clock import Clock
from kvbm.errors import ManagerRefused
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.session import WAITS
from kvbm.tiers.disk.tier import DiskTier

OPEN_S_MAX = 5.0
"""The first engine of a namespace waits so long for its disk, which may say that a setting cannot be used."""

OpenDisk = Callable[[Namespace, BlockLayout, bool], DiskTier]


@dataclass(slots=True, eq=False)
class _Opening:
    namespace: Namespace
    layout: BlockLayout
    events: bool
    disk: DiskTier
    waiting: int = 0
    """Sessions that wait for it."""


class DiskOpenings:
    """The disks that are being opened, at most one for each namespace. Owned by the manager's thread."""

    def __init__(self, open_disk: OpenDisk, clock: Clock) -> None:
        """`open_disk` begins to open the disk of a namespace, of blocks with this layout; with the flag, one that
        keeps what engines say of blocks."""
        self._open_disk, self._clock = open_disk, clock
        self._openings: dict[bytes, _Opening] = {}

    def awaited(self) -> list[Namespace]:
        """The namespaces whose disk a session waits for."""
        return [opening.namespace for opening in self._openings.values() if opening.waiting]

    def wait(self, namespace: Namespace, layout: BlockLayout, events: bool, room: int) -> Iterator[object]:
        """Open a disk and wait for it, `OPEN_S_MAX` at most, while others have their turns.

        `room` disks may be open in this table: others that no session waits for are closed. Raises SettingsError, and
        ManagerRefused for another layout than that of the disk.
        """
        opening = self._begin(namespace, layout, events, room)
        disk, until_s = opening.disk, self._clock() + OPEN_S_MAX
        opening.waiting += 1
        try:
            while self._openings.get(namespace.fingerprint) is opening and disk.fault:
                if disk.heal() is not Outcome.PENDING or self._clock() >= until_s:
                    return
                yield WAITS
        finally:
            opening.waiting -= 1

    def take(self, namespace: Namespace, layout: BlockLayout, events: bool) -> tuple[DiskTier, bool]:
        """The disk that `wait` opened, or opens still, and whether it keeps what engines say of blocks.

        Raises the error for which it could not be opened.
        """
        opening = self._openings.pop(namespace.fingerprint, None)
        if opening is None:
            return self._open_disk(namespace, layout, events), events
        assert opening.layout == layout, f"disk of {opening.layout} for {layout}"
        disk = opening.disk
        if disk.fault and disk.opening_error is not None:
            disk.close(keep=True, deadline_s=0.0)
            raise disk.opening_error
        return disk, opening.events

    def close(self, keep: bool) -> None:
        """Close all of them, without a wait."""
        while self._openings:
            self._openings.popitem()[1].disk.close(keep, deadline_s=0.0)

    def _begin(self, namespace: Namespace, layout: BlockLayout, events: bool, room: int) -> _Opening:
        known = self._openings.get(namespace.fingerprint)
        if known is not None and known.layout == layout:
            return known
        if known is not None and known.waiting:
            raise ManagerRefused(f"block layout {layout} differs from this namespace's {known.layout}")
        if known is not None:
            self._abandon(known)
        for opening in [each for each in self._openings.values() if not each.waiting]:
            if len(self._openings) >= room:
                self._abandon(opening)
        disk = self._open_disk(namespace, layout, events)
        opening = self._openings[namespace.fingerprint] = _Opening(namespace, layout, events, disk)
        return opening

    def _abandon(self, opening: _Opening) -> None:
        del self._openings[opening.namespace.fingerprint]
        opening.disk.close(keep=True, deadline_s=0.0)
