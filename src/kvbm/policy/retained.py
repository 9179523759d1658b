"""What clients asked to be kept: blocks by key, each until some time and with a priority, within a budget.

A quarter of a tier's slots can be retained, and within that each active tenant has an equal part. What is retained may
not be here yet: it counts all the same, or else a promise would be made twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import count

BUDGET_PART = 4
_SPARE_ENTRIES = 1024


class Retention:
    """One block that is retained. `slot` is -1 where it is not here."""

    __slots__ = ("key", "priority", "slot", "tenant", "until_s")

    def __init__(self, key: Hashable, until_s: float, priority: int, tenant: int) -> None:
        self.key, self.until_s, self.priority, self.tenant = key, until_s, priority, tenant
        self.slot = -1


class Retained:
    """The retained blocks of a tier of `slot_count` slots, each of a tenant, by its number."""

    def __init__(self, slot_count: int) -> None:
        self.budget = slot_count // BUDGET_PART
        self.here: dict[int, Retention] = {}
        """Those that are in the tier, by slot."""
        self._entries: dict[Hashable, Retention] = {}
        # The keys of each tenant by priority, in the order in which they came.
        self._queues: dict[int, dict[int, dict[Hashable, None]]] = {}
        self._used: dict[int, int] = {}
        # By the time that each was to end when it was queued; it may have been prolonged since.
        self._ends: list[tuple[float, int, Retention]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._entries)

    def priorities(self) -> list[int]:
        """The priorities of what is retained, the lowest first."""
        return sorted({priority for queues in self._queues.values() for priority in queues})

    def retain(
        self,
        keys: Sequence[Hashable],
        slots: Sequence[int],
        until_s: float,
        priority: int,
        tenant: int,
        part_count: int,
    ) -> tuple[int, list[int]]:
        """Retain the blocks for the tenant, whose part is one of `part_count`; where that is not enough, the first.

        `slots` says where each is (or -1). The number that is retained, and the slots that others lost by it. Nothing
        ends sooner for that, and no priority falls: who asked for more is not overruled by a later word.
        """
        part, freed, done = max(1, self.budget // max(1, part_count)), list[int](), 0
        for key, slot in zip(keys, slots, strict=True):
            entry = self._entries.get(key)
            if entry is None:
                if not self._make_room(tenant, priority, part, freed):
                    break
                entry = self._entries[key] = Retention(key, until_s, priority, tenant)
                self._enqueue(entry)
                heapq.heappush(self._ends, (until_s, next(self._serial), entry))
            else:
                entry.until_s = max(entry.until_s, until_s)
                if priority > entry.priority:
                    self._dequeue(entry)
                    entry.priority = priority
                    self._enqueue(entry)
            if slot >= 0:
                entry.slot = slot
                self.here[slot] = entry
            done += 1
        self._tidy()
        return done, freed

    def came(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """These blocks are in these slots now."""
        for key, slot in zip(keys, slots, strict=True) if self._entries else ():
            entry = self._entries.get(key)
            if entry is not None and entry.until_s > now_s:
                entry.slot = slot
                self.here[slot] = entry

    def gone(self, slot: int) -> bool:
        """The block in this slot has left the tier; whether it was retained."""
        entry = self.here.pop(slot, None)
        if entry is not None:
            entry.slot = -1
        return entry is not None

    def expire(self, now_s: float) -> list[int]:
        """End what is due; the slots that it was in."""
        ended, ends = list[int](), self._ends
        while ends and ends[0][0] <= now_s:
            _, _, entry = heapq.heappop(ends)
            if self._entries.get(entry.key) is not entry:
                continue
            if entry.until_s > now_s:
                heapq.heappush(ends, (entry.until_s, next(self._serial), entry))
                continue
            self._end(entry, ended)
        return ended

    def end_absent(self, entries: Iterable[Retention]) -> None:
        """Those of these blocks that are not here never come back: the budget is for others."""
        for entry in entries:
            if entry.slot < 0 and self._entries.get(entry.key) is entry:
                self._end(entry, [])

    def all(self) -> Iterable[Retention]:
        """Everything that is retained."""
        return self._entries.values()

    def _make_room(self, tenant: int, priority: int, part: int, freed: list[int]) -> bool:
        """Room for one more of the tenant's: within its part, or in the place of one of its own that is worth less."""
        if self._used.get(tenant, 0) >= part:
            return self._end_least(tenant, priority, freed)
        if len(self._entries) < self.budget:
            return True
        # Others have more than their part by now, as there are more tenants than there were.
        most = max(self._used, key=self._used.__getitem__, default=tenant)
        return self._used.get(most, 0) > part and self._end_least(most, 1 << 30, freed)

    def _end_least(self, tenant: int, priority: int, freed: list[int]) -> bool:
        """End the last of what the tenant has of the lowest priority, if that is below `priority`."""
        queues = self._queues.get(tenant)
        if not queues or (least := min(queues)) >= priority:
            return False
        self._end(self._entries[next(reversed(queues[least]))], freed)
        return True

    def _end(self, entry: Retention, freed: list[int]) -> None:
        del self._entries[entry.key]
        self._dequeue(entry)
        if entry.slot >= 0:
            del self.here[entry.slot]
            freed.append(entry.slot)

    def _enqueue(self, entry: Retention) -> None:
        self._used[entry.tenant] = self._used.get(entry.tenant, 0) + 1
        self._queues.setdefault(entry.tenant, {}).setdefault(entry.priority, {})[entry.key] = None

    def _dequeue(self, entry: Retention) -> None:
        self._used[entry.tenant] -= 1
        queues = self._queues[entry.tenant]
        del queues[entry.priority][entry.key]
        if not queues[entry.priority]:
            del queues[entry.priority]
        if not queues:
            del self._queues[entry.tenant], self._used[entry.tenant]

    def _tidy(self) -> None:
        """Drop the ends of what was given up before, once they are half of all."""
        if len(self._ends) > 2 * len(self._entries) + _SPARE_ENTRIES:
            self._ends = [end for end in self._ends if self._entries.get(end[2].key) is end[2]]
            heapq.heapify(self._ends)
