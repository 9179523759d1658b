"""Whose blocks a tier holds, and who is sure of them: the floors of the tenants that are active.

A tenant is whoever asks under one cache salt; all that is asked without a salt is one tenant too. With n active tenants
an equal share is an nth of the slots, and the floor is the part of it (`share`) that nobody else may take. What lies
between the floors is for the policy to give away, so that a tier is never half empty for somebody's sake.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias

import numpy as np

Slots: TypeAlias = "Sequence[int] | np.ndarray"

ACTIVE_S = 600.0
"""A tenant that has asked for nothing for so long is sure of nothing."""
TENANTS_MAX = 1024
NOBODY, OTHERS = 0, 1
"""Numbers of no tenant: blocks of which nobody knows whose they are; and all tenants beyond the first, together."""
_MARGIN = 16


class Shares:
    """Numbers for tenants, and the slots that each holds; two bytes a slot. A `share` of 0 protects nobody.

    A tenant is *sheltered* while it holds about its floor. Shelter begins a sixteenth of the floor before it must, and
    ends an eighth above: else one at the border would go in and out with each block, and each time a policy would
    learn of all its blocks anew.
    """

    def __init__(self, slot_count: int, share: float) -> None:
        self._slot_count = slot_count
        self._share = share
        self.label = array("H", bytes(2 * slot_count))
        self.held = [0, 0]
        """Slots of each number that are not free."""
        self.sheltered: set[int] = set()
        self.floor = 0
        self.margin = 1
        """From a tenant that is not sheltered so many blocks can go before it holds less than its floor."""
        self.left: set[int] = set()
        """Tenants whose shelter has ended: whoever looks at them clears them."""
        self._numbers: dict[str, int] = {}
        self._names: list[str | None] = [None, None]
        # When each asked last, the oldest first.
        self._asked_s: dict[int, float] = {}

    @property
    def active_count(self) -> int:
        """How many tenants have asked for something of late."""
        return len(self._asked_s)

    @property
    def poor_count(self) -> int:
        """How many of them hold less than their floor."""
        return sum(self.held[number] < self.floor for number in self._asked_s)

    def active(self) -> list[tuple[str, float]]:
        """Those of them that are told apart, and when each asked last, the oldest first."""
        named = ((self._names[number], asked_s) for number, asked_s in self._asked_s.items())
        return [(name, asked_s) for name, asked_s in named if name is not None]

    def number(self, tenant: str | None) -> int:
        """The tenant's number, a new one where it has none; NOBODY for None."""
        if tenant is None:
            return NOBODY
        found = self._numbers.get(tenant)
        return self._new_number(tenant) if found is None else found

    def name(self, number: int) -> str | None:
        """The tenant of that number; None where it stands for no one tenant."""
        return self._names[number]

    def asks(self, number: int, now_s: float) -> None:
        """The tenant asks for something now: it is active."""
        self.time_passes(now_s)
        if number != NOBODY:
            new = self._asked_s.pop(number, None) is None
            self._asked_s[number] = now_s
            if new:
                self._set_floor()

    def time_passes(self, now_s: float) -> None:
        """Whoever has asked for nothing for long is not active any more."""
        if not self._asked_s or next(iter(self._asked_s.values())) + ACTIVE_S > now_s:
            return
        for other in list(takewhile(lambda other: self._asked_s[other] + ACTIVE_S <= now_s, self._asked_s)):
            del self._asked_s[other]
        self._set_floor()

    def take(self, slots: Slots, number: int) -> None:
        """These slots, which were free, hold blocks of the tenant."""
        np.frombuffer(self.label, np.uint16)[np.asarray(slots, np.intp)] = number
        self.held[number] += len(slots)
        self._judge(number)

    def give(self, slots: Sequence[int], number: int) -> list[tuple[int, list[int]]]:
        """The blocks in these slots (-1 is none) are the tenant's, whosever they were taken for: the numbers of those,
        each with its slots."""
        label, at = np.frombuffer(self.label, np.uint16), np.fromiter(slots, np.intp, len(slots))
        at = at[at >= 0]
        at = at[label[at] != number]
        if not len(at):
            return []
        before = label[at]
        moved = [(each, at[before == each].tolist()) for each in np.flatnonzero(np.bincount(before)).tolist()]
        label[at] = number
        for each, theirs in moved:
            self.held[each] -= len(theirs)
        self.held[number] += len(at)
        for each in (*(each for each, _ in moved), number):
            self._judge(each)
        return moved

    def free(self, slots: Iterable[int]) -> None:
        """These slots hold nothing any more."""
        label, held = self.label, self.held
        touched = set()
        for slot in slots:
            number = label[slot]
            touched.add(number)
            held[number] -= 1
            label[slot] = NOBODY
        for number in touched:
            self._judge(number)

    def spare(self, number: int, exact: bool) -> int:
        """So many blocks of the tenant may go before it is sheltered; or `exact`, before it holds its floor."""
        if not self.floor or number not in self._asked_s:
            return self._slot_count
        return self.held[number] - self.floor - (0 if exact else self.margin - 1)

    def at_floor(self, number: int) -> bool:
        """Whether the tenant is active and holds no more than its floor."""
        return self.held[number] <= self.floor and number in self._asked_s

    def _new_number(self, tenant: str) -> int:
        if len(self._names) < TENANTS_MAX:
            self._numbers[tenant] = number = len(self._names)
            self._names.append(tenant)
            self.held.append(0)
            return number
        for name, number in self._numbers.items():
            if not self.held[number] and number not in self._asked_s:
                del self._numbers[name]
                self._numbers[tenant], self._names[number] = number, tenant
                return number
        return OTHERS

    def _set_floor(self) -> None:
        active = len(self._asked_s)
        self.floor = int(self._slot_count * self._share) // active if active > 1 else 0
        self.margin = max(1, self.floor // _MARGIN)
        self._judge_all()

    def _judge_all(self) -> None:
        for number in self.sheltered | self._asked_s.keys():
            self._judge(number)

    def _judge(self, number: int) -> None:
        """Begin or end the tenant's shelter where its time has come."""
        was = number in self.sheltered
        below = self.floor + (2 if was else 1) * self.margin
        now = self.floor > 0 and self.held[number] < below and number in self._asked_s
        if now and not was:
            self.sheltered.add(number)
            self.left.discard(number)
        elif was and not now:
            self.sheltered.discard(number)
            self.left.add(number)
