"""Leases and reservations: the slots that an owner holds, and until when.

A lookup takes one `Lease` over a run of blocks; a store takes one `Reservation` over slots it will fill. Both have
an owner (a session) and a deadline on the manager's clock, and both end with their owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Generic, TypeVar

from kvbm.block import BlockKey

Owner = int
"""A session's number; 0 is the in-process library. Negative ones are the operator's, and no engine's."""

PINS: Owner = -1
PREFETCHES: Owner = -2
READERS: Owner = -3
"""Those of readers on other nodes (see `lending`)."""


class LeaseState(IntEnum):
    """The state of one block of a lease."""

    ONBOARDING = 0
    PINNED = 1
    DROPPED = 2


_PINNED = bytes((LeaseState.PINNED,))


@dataclass(slots=True)
class Lease:
    """A pin on the run of blocks that a lookup found.

    `slots[i]` is leased when `states[i]` is PINNED and on its way up when ONBOARDING. `ready` counts the leading
    pinned blocks; `sources[i]` is the tier (see `block.Tier`) in which the block was found. When a block fails, `keys`,
    `slots` and `sources` end before it; `states` keeps its length, so that late arrivals find DROPPED.

    With several groups the run is what an engine lacks at `boundary` (see `grouping`), and stands for `prompt_blocks`
    of the prompt; half of it is worth nothing. `tenant` is whose it is, None where nobody knows. *Expired*: its
    deadline passed, and it ends in a slice to come.
    """

    owner: Owner
    number: int
    keys: list[BlockKey]
    slots: list[int]
    sources: bytearray
    states: bytearray
    deadline_s: float
    ready: int = 0
    boundary: int = 0
    prompt_blocks: int = 0
    tenant: str | None = None
    expired: bool = False

    def advance(self) -> bool:
        """Recount `ready`; True when it grew."""
        before = self.ready
        self.ready = len(self.states) - len(self.states.lstrip(_PINNED))
        return self.ready > before

    def pinned(self) -> list[int]:
        """The slots that the lease holds by now."""
        pinned = self.states.count(LeaseState.PINNED)
        if pinned in (0, len(self.slots)):
            return self.slots if pinned else []
        pairs = zip(self.slots, self.states, strict=False)
        return [slot for slot, state in pairs if state == LeaseState.PINNED]

    def drop(self) -> None:
        """It has ended: blocks that arrive from now on are not for it."""
        self.states = bytearray((LeaseState.DROPPED,)) * len(self.states)

    @property
    def final(self) -> bool:
        """No more blocks will become ready."""
        return self.ready == len(self.slots)


@dataclass(slots=True)
class Reservation:
    """Slots being filled by an owner's workers.

    *Condemned*: its deadline passed or its owner died; a commit is refused and the slots stay filling until no
    worker can write to them any more. *Stale*: the cache was cleared meanwhile; a commit gives the slots back.
    """

    owner: Owner
    number: int
    keys: list[BlockKey]
    parents: list[BlockKey | None]
    slots: list[int]
    deadline_s: float
    condemned: bool = False
    stale: bool = False

    def take(self, count: int) -> Reservation:
        """Take the first blocks out of it, so many at most."""
        part = Reservation(
            self.owner,
            self.number,
            self.keys[:count],
            self.parents[:count],
            self.slots[:count],
            self.deadline_s,
        )
        del self.keys[:count], self.parents[:count], self.slots[:count]
        return part


HeldT = TypeVar("HeldT", Lease, Reservation)


class HoldTable(Generic[HeldT]):
    """Leases or reservations by (owner, number). Bounded by `per_owner_max` for each owner."""

    def __init__(self, per_owner_max: int = 4096) -> None:
        self._held: dict[Owner, dict[int, HeldT]] = {}
        self.per_owner_max = per_owner_max

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def __iter__(self) -> Iterator[HeldT]:
        return chain.from_iterable(held.values() for held in self._held.values())

    def has_room(self, owner: Owner) -> bool:
        return len(self._held.get(owner, ())) < self.per_owner_max

    def get(self, owner: Owner, number: int) -> HeldT | None:
        return self._held.get(owner, {}).get(number)

    def lasts(self, held: HeldT) -> bool:
        """Whether it has not ended."""
        return self.get(held.owner, held.number) is held

    def add(self, held: HeldT) -> None:
        of_owner = self._held.setdefault(held.owner, {})
        assert held.number not in of_owner, f"number {held.number} is in use"
        of_owner[held.number] = held

    def pop(self, owner: Owner, number: int) -> HeldT | None:
        of_owner = self._held.get(owner, {})
        held = of_owner.pop(number, None)
        if held is not None and not of_owner:
            del self._held[owner]
        return held

    def of(self, owner: Owner) -> list[HeldT]:
        return list(self._held.get(owner, {}).values())

    def overdue(self, now_s: float) -> list[HeldT]:
        return [held for held in self if held.deadline_s <= now_s]
