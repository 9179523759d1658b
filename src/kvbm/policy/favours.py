"""An eviction policy around any other one, which passes over blocks that are favoured: retained ones, and those of a
tenant that holds no more than its floor.

The inner policy takes them for leased, so every policy can be favoured in. What it passes over for that it may have
dropped from its queues, as it may with leases; so this remembers which they were, and offers them again (`evictable`)
when the favour ends.

Favours bias and never lock. Who needs room goes through these steps, each only where the one before left too little:

1. what is not favoured;
2. what a tenant holds beyond its floor, though it is sheltered still (see `shares`);
3. the newcomer's own tenant's, though that holds no more than its floor;
4. what is retained, the lowest priority first.

A policy may find a newcomer worth less than every block that could go. Then it gets no slot, and nothing that is
retained goes in its place: the next step is only taken where there was nothing left to choose from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Sequence
from itertools import islice

from kvbm.policy.contract import ClientWord, EvictionPolicy, insert_tail, none_leased, request_tail
from kvbm.policy.retained import Retained
from kvbm.policy.shares import NOBODY, Shares, Slots

RETURNED_AT_ONCE = 4096
"""Slots whose favour has ended and that the inner policy is offered in one go, unless it has nothing else."""
ALL_RETAINED = -1
_ALL = 1 << 30


class Favours:
    """A policy of `slot_count` slots around `inner`. `share` is the part of an equal share that a tenant is sure of.

    Where the tier is in use already, `filling` has the slots that are being filled, and `used` those that are not free;
    their blocks are the tenant's of that name, or no tenant's for None.
    """

    def __init__(
        self,
        inner: EvictionPolicy,
        slot_count: int,
        share: float,
        filling: Iterable[int] = (),
        used: Slots = (),
        tenant: str | None = None,
    ) -> None:
        self.inner = inner
        self.shares = Shares(slot_count, share)
        self.retained = Retained(slot_count)
        self.evicted_retained = 0
        """Retained blocks that had to go, since whoever counts them cleared it."""
        self.spared = {"retention": 0, "share": 0}
        """Blocks that were passed over, by what favoured them; likewise."""
        self._newcomer = NOBODY
        self._filling = set(filling)
        # What the inner policy was refused: for its tenant's sake, and as it is retained.
        self._refused_for: dict[int, dict[int, None]] = {}
        self._refused_retained: dict[int, None] = {}
        # Slots that it is to be offered again.
        self._returning: dict[int, None] = {}
        self.shares.take(used, self.shares.number(tenant))
        hinted = getattr(inner, "hinted", None)
        if hinted is not None:  # `knows_hints` shall say of this what it says of the inner one
            self.hinted: Callable[[Hashable, ClientWord, float], None] = hinted

    # ---- whose turn it is

    def asked_by(self, tenant: str | None, now_s: float) -> None:
        """What is requested next is the tenant's; None: of nobody that is known."""
        self._newcomer = self.shares.number(tenant)
        self.shares.asks(self._newcomer, now_s)

    def stored_for(self, tenant: str | None, parent: int) -> None:
        """What comes in next is the tenant's. Where that is not said, it is whose the block in slot `parent` is."""
        number = self.shares.label[parent] if parent >= 0 and not tenant else NOBODY
        self._newcomer = number or self.shares.number(tenant)

    def tenant_of(self, slot: int) -> str | None:
        """Whose block is in this slot; None where nobody knows."""
        return self.shares.name(self.shares.label[slot])

    def retain(
        self, keys: Sequence[Hashable], slots: Sequence[int], until_s: float, priority: int, now_s: float
    ) -> int:
        """Prefer these blocks of the tenant that asks until then; `slots` says where each is (or -1). Of how many
        that can be promised."""
        self._no_longer_retained(self.retained.expire(now_s))
        kept, freed = self.retained.retain(
            keys, slots, until_s, priority, self._newcomer, self.shares.active_count
        )
        self._no_longer_retained(freed)
        return kept

    def check(self, used: int) -> None:
        """Assert that the `used` slots each count for one tenant, and that what is noted of slots is of used ones."""
        shares = self.shares
        held = [shares.label.count(number) for number in range(len(shares.held))]
        assert sum(shares.held) == used, f"{sum(shares.held)} slots are somebody's, of {used}"
        assert held[1:] == shares.held[1:], f"{shares.held} slots are held, and {held} are labelled"
        assert self._refused_retained.keys() <= self.retained.here.keys()
        for number, refused in self._refused_for.items():
            assert all(shares.label[slot] == number for slot in refused)

    # ---- the policy of the pool

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """The blocks that are here are the tenant's who asks."""
        self._label(slots)
        self.inner.requested(keys, slots, now_s)

    def requested_tail(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """The same of a tail; the inner policy is told so if it knows tails."""
        self._label(slots)
        request_tail(self.inner, keys, slots, now_s)

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        self.inner.finished(key, output_tokens, now_s)

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Blocks come in for the tenant whose turn it is."""
        self._fill(keys, slots, now_s)
        self.inner.inserted(keys, slots, parent, now_s)

    def inserted_tail(
        self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float
    ) -> None:
        """The same of a tail; the inner policy is told so if it knows tails."""
        self._fill(keys, slots, now_s)
        insert_tail(self.inner, keys, slots, parent, now_s)

    def evictable(self, slots: Iterable[int]) -> None:
        if self._filling:
            slots = slots if isinstance(slots, Sequence) else list(slots)
            self._filling.difference_update(slots)
        self.inner.evictable(slots)

    def removed(self, slots: Iterable[int]) -> None:
        slots = slots if isinstance(slots, Sequence) else list(slots)
        self._forget(slots)
        self.inner.removed(slots)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The inner policy's choice among what is not favoured, and then among what is favoured less (see above)."""
        self._settle(leased, now_s)
        floor, margin = self.shares.floor, self.shares.margin
        favoured = self.retained.here or self.shares.sheltered or self._returning
        if not favoured and (not floor or needed <= margin):  # nobody can fall below its floor by this answer
            chosen = self.inner.victims(needed, incoming, leased, now_s)
            self._forget(chosen)
            return chosen
        chosen = []
        for kept, slots in self._steps(leased):
            self._offer(slots, leased)
            while (rest := needed - len(chosen)) > 0:
                kept.begin()
                found = self.inner.victims(rest, incoming, kept, now_s)
                self._evict(found)
                chosen += found
                self._offer(kept.beyond, leased)
                if found:
                    continue
                if self._returning:
                    self._return_some(leased, len(self._returning))
                    continue
                if incoming and kept.allowed:
                    return chosen  # they are worth less than what could go
                break
            else:
                break
        return chosen

    def _steps(self, leased: Container[int]) -> Iterator[tuple[_Kept, list[int]]]:
        """What is kept in each step, and the slots that may go now and were refused in an earlier one."""
        shares, retained, own = self.shares, self.retained, self._newcomer
        yield _Kept(self, leased), []
        if shares.sheltered:
            rich = [number for number in self._refused_for if not shares.at_floor(number)]
            yield _Kept(self, leased, exact=True), self._take_refused(rich)
            if own in shares.sheltered:
                yield _Kept(self, leased, exact=True, exempt=own), self._take_refused([own])
        for priority in retained.priorities() if retained.here else ():
            slots = [slot for slot in self._refused_retained if retained.here[slot].priority <= priority]
            for slot in slots:
                del self._refused_retained[slot]
            yield _Kept(self, leased, priority, exact=True, exempt=own), slots

    # ---- what the inner policy was refused

    def refuse(self, slot: int, number: int) -> None:
        """The inner policy met this slot, and it may not go: for the sake of the tenant of that number, or, for NOBODY,
        as it is retained."""
        if number == NOBODY:
            refused, favour = self._refused_retained, "retention"
        else:
            refused, favour = self._refused_for.setdefault(number, {}), "share"
        if slot not in refused:
            refused[slot] = None
            self.spared[favour] += 1

    def _settle(self, leased: Container[int], now_s: float) -> None:
        """End what is due, and act on tenants whose shelter began or ended."""
        if self.retained.here:
            self._no_longer_retained(self.retained.expire(now_s))
        shares = self.shares
        shares.time_passes(now_s)
        if shares.left:
            self._returning.update(dict.fromkeys(self._take_refused(shares.left)))
            shares.left.clear()
        if self._returning:
            self._return_some(leased, RETURNED_AT_ONCE)

    def _return_some(self, leased: Container[int], most: int) -> None:
        slots = list(islice(self._returning, most))
        for slot in slots:
            del self._returning[slot]
        self._offer(slots, leased)

    def _offer(self, slots: Iterable[int], leased: Container[int]) -> None:
        """Slots that the inner policy was refused may go: those that are in use come back when that ends."""
        offered = [slot for slot in slots if slot not in self._filling and slot not in leased]
        if offered:
            self.inner.evictable(offered)

    def _take_refused(self, numbers: Iterable[int]) -> list[int]:
        return [slot for number in list(numbers) for slot in self._refused_for.pop(number, ())]

    def _no_longer_retained(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self._refused_retained.pop(slot, self) is None:
                self._returning[slot] = None

    # ---- blocks that come and go

    def _label(self, slots: Sequence[int]) -> None:
        if self._newcomer == NOBODY:
            return
        for number, moved in self.shares.give(slots, self._newcomer):
            refused = self._refused_for.get(number)
            for slot in moved if refused else ():
                if refused is not None and refused.pop(slot, self) is None:
                    self._returning[slot] = None

    def _fill(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        self._filling.update(slots)
        self.shares.take(slots, self._newcomer)
        self.retained.came(keys, slots, now_s)

    def _evict(self, slots: Sequence[int]) -> None:
        here = self.retained.here
        self.evicted_retained += sum(slot in here for slot in slots) if here else 0
        self._forget(slots)

    def _forget(self, slots: Sequence[int]) -> None:
        """These slots hold nothing any more."""
        for each in (self._refused_retained, self._returning):
            for slot in slots if each else ():
                each.pop(slot, None)
        for slot in slots if self._refused_for else ():
            if (refused := self._refused_for.get(self.shares.label[slot])) is not None:
                refused.pop(slot, None)
        for slot in slots if self.retained.here else ():
            self.retained.gone(slot)
        self._filling.difference_update(slots)
        self.shares.free(slots)


class _Kept:
    """The slots that the inner policy may not choose, as a container of leased ones. `allowed` has those that it asked
    about and may choose: of each tenant so many that it does not fall below its floor by one answer. Those that it
    asked about after that are `beyond`; they may be chosen by the next answer.

    `priority`: what is retained with that or less may go. `exact`: tenants are kept at their floors, not above.
    `exempt`: what this tenant holds may go.
    """

    def __init__(
        self,
        favours: Favours,
        leased: Container[int],
        priority: int = ALL_RETAINED,
        exact: bool = False,
        exempt: int = NOBODY,
    ) -> None:
        self._favours, self._leased = favours, leased
        self._here, self._shares = favours.retained.here, favours.shares
        self._priority, self._exact, self._exempt = priority, exact, exempt
        self.allowed: set[int] = set()
        self.beyond: list[int] = []
        self._spare: dict[int, int] = {}

    def begin(self) -> None:
        """The next answer begins."""
        self.allowed.clear()
        self.beyond.clear()
        self._spare.clear()

    def __contains__(self, slot: object) -> bool:
        assert isinstance(slot, int)
        if slot in self._leased:
            return True
        if self._here and (entry := self._here.get(slot)) is not None and entry.priority > self._priority:
            self._favours.refuse(slot, NOBODY)
            return True
        if slot in self.allowed:
            return False
        number = self._shares.label[slot]
        spare = self._spare_of(number)
        if spare <= 0:
            if self._is_kept(number):
                self._favours.refuse(slot, number)
            else:
                self.beyond.append(slot)
            return True
        self._spare[number] = spare - 1
        self.allowed.add(slot)
        return False

    def isdisjoint(self, slots: Collection[int]) -> bool:
        """Whether all of the slots may go. It may say no where some are favoured less than this forbids; then whoever
        asks looks at each."""
        if not none_leased(self._leased, slots):
            return False
        if self._here and not self._here.keys().isdisjoint(slots):
            return False
        if self._shares.floor:
            new = set(slots) - self.allowed
            counts = Counter(map(self._shares.label.__getitem__, new))
            if any(self._spare_of(number) < count for number, count in counts.items()):
                return False
            for number, count in counts.items():
                self._spare[number] -= count
            self.allowed |= new
        return True

    def _spare_of(self, number: int) -> int:
        """How many more blocks of the tenant this answer may take."""
        spare = self._spare.get(number)
        if spare is None:
            if number == self._exempt:
                spare = _ALL
            else:
                spare = 0 if self._is_kept(number) else self._shares.spare(number, self._exact)
            self._spare[number] = spare
        return spare

    def _is_kept(self, number: int) -> bool:
        """Whether nothing of the tenant may go."""
        shares = self._shares
        kept = number in shares.sheltered and number != self._exempt
        return kept and (not self._exact or shares.at_floor(number))
