"""From computed blocks to slots: reserve slots for blocks that the manager lacks, plan the copy, commit it.

A block belongs to its request until the request ends or is preempted, and is not overwritten before. So copies may run
beside later steps, until the step that *releases* their store: that step waits for them. The blocks of a request that
ends are pinned until they are copied, so that no step waits for its copies; those of a preempted request are released,
because the engine needs them. Pins have a bound (`Pins.has_room`): beyond it, and where the engine cannot pin, the
blocks are released when the request ends.

A *fleeting* store is of blocks that their request gives up while it runs (a sliding window's, a recurrent state). They
are pinned until they are copied; where the engine cannot pin, the store is planned and released in the next step, or
given up. An engine that zeroes blocks when it hands them out may do that before we read what they held: there every
store's blocks are pinned until they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvbm.block import KEY_BYTES
from kvbm.clock import Clock
from kvbm.leader.device import DeviceBlocks, Pins
from kvbm.leader.link import Link
from kvbm.leader.tracked import NOTHING_SAID, Keep, Said
from kvbm.protocol import REFUSED, Commit, Reserve, ReserveReply
from kvbm.step_plan import StepReport, StorePlan

STORE_AGE_S_MAX = 30.0
"""A reservation that is older is not planned. No step waits for copies of one that is older, which take milliseconds:
their device may hang. Their blocks go back to the engine, and the store fails."""
PINNED_UNANSWERED_S_MAX = 2.0
"""How long a silent manager may keep blocks from the engine."""
OPEN_STORES_MAX = 2048
PENDING_S_MAX = 1.0


@dataclass(slots=True)
class _Store:
    number: int
    life: int
    epoch: int
    request: str
    device_blocks: tuple[int, ...]
    asked_s: float
    first: int = 0
    keep: Keep | None = None
    slots: tuple[int, ...] | None = None
    generations: tuple[int, ...] = ()
    planned_slots: int = 0
    ranks: int = 0
    answer_s: float = 0.0
    fleeting: bool = False
    pinned: bool = False
    gone: bool = False
    """Its request has given its blocks back. A request may come again under its name at once: that is another life of
    it, whose stores are not meant."""


class ShortAnswer(NamedTuple):
    """A reservation of which only the first `taken` blocks got slots or are held; the others were refused.

    `first` is the number of the first block in the chain of `request`, `blocks` how many were asked for.
    """

    request: str
    first: int
    taken: int
    blocks: int


class Stores:
    """All stores of one engine, in three steps: asked, planned, committed. `rank_count` ranks must report each."""

    def __init__(
        self,
        link: Link,
        clock: Clock,
        rank_count: int,
        first_number: int,
        device: DeviceBlocks | None = None,
        pin_all: bool = False,
    ) -> None:
        self._link = link
        self._pins = Pins(device)
        self._pin_all = pin_all
        self._clock = clock
        self._rank_count = rank_count
        self._numbers = count(first_number)
        self._asked: dict[int, _Store] = {}
        self._planned: dict[int, _Store] = {}
        self._failed: dict[int, set[int]] = {}
        # Made when requests end, hundreds of them in one step; outdated once a store is asked for.
        self._by_request: dict[str, list[_Store]] | None = None

    def __len__(self) -> int:
        return len(self._asked) + len(self._planned)

    @property
    def unanswered(self) -> bool:
        """Whether the manager has yet to answer a reservation."""
        return any(store.slots is None for store in self._asked.values())

    @property
    def last_chance(self) -> bool:
        """Whether the next step is the last one in which a store can be planned that the manager has yet to answer."""
        return any(
            store.slots is None and not store.pinned and (store.fleeting or store.gone)
            for store in self._asked.values()
        )

    @property
    def pending(self) -> bool:
        """Whether answers or reports of recent stores are still to come, or blocks are pinned. The engine should step
        on for them, even with no request left: steps end all pins in time."""
        now_s = self._clock()
        return any(
            store.pinned or now_s - store.asked_s < PENDING_S_MAX
            for store in (*self._asked.values(), *self._planned.values())
        )

    @property
    def unpins_soon(self) -> bool:
        """Whether blocks are pinned until copies end that were planned just now."""
        now_s = self._clock()
        return any(store.pinned and now_s - store.asked_s < PENDING_S_MAX for store in self._planned.values())

    def ask(
        self,
        request: str,
        parent: bytes,
        keys: bytes,
        device_blocks: Sequence[int],
        hashes: bytes = b"",
        first: int = 0,
        keep: Keep | None = None,
        again: bool = False,
        groups: bytes = b"",
        fleeting: bool = False,
        said: Said = NOTHING_SAID,
        tenant: str = "",
    ) -> bool:
        """Reserve slots for blocks that this step computes; False when nothing can be stored now.

        `keys` are joined, `parent` is the key before the first or empty, and `hashes` is as in `Reserve`.
        `first` is the number of the first block in its request; `keep` is asked before the blocks are committed.
        `again`: the manager has refused some of them before.
        `groups` is as in `Reserve`, for `fleeting` see the module, and `said` is what may be announced of the blocks.
        `tenant` is as in `Lookup`.
        """
        assert len(keys) == KEY_BYTES * len(device_blocks) > 0
        ready = self._link.ready
        if ready is None or len(self._asked) + len(self._planned) >= OPEN_STORES_MAX:
            return False
        pinned = (fleeting or self._pin_all) and self._pins.pin(device_blocks)
        if self._pin_all and not pinned:
            return False
        number = next(self._numbers)
        asked = Reserve(
            store=number,
            parent=parent,
            keys=keys,
            hashes=hashes,
            groups=groups,
            again=again,
            tokens=said.tokens,
            before=said.before,
            facts=said.facts,
            tenant=tenant,
        )
        if not self._link.send(asked):
            if pinned:
                self._pins.unpin(device_blocks)
            return False
        self._by_request = None
        self._asked[number] = _Store(
            number,
            self._link.life,
            ready.epoch,
            request,
            tuple(device_blocks),
            self._clock(),
            first,
            keep,
            fleeting=fleeting,
            pinned=pinned,
        )
        return True

    def replied(self, reply: ReserveReply) -> ShortAnswer | None:
        """The manager's answer to a reservation; None unless it refused something. If the store was given up, so were
        its slots, unseen."""
        store = self._asked.get(reply.store)
        if store is None:
            return None
        store.slots, store.generations = reply.slots, reply.generations
        store.answer_s = self._clock() - store.asked_s
        if REFUSED not in reply.slots:
            return None
        return ShortAnswer(store.request, store.first, reply.slots.index(REFUSED), len(reply.slots))

    def plan(self) -> tuple[StorePlan, ...]:
        """The copies for this step. Requests that have `ended` lose their device blocks in it: their stores are planned
        now or given up.
        """
        plans: list[StorePlan] = []
        now_s, self._by_request = self._clock(), None
        for store in list(self._asked.values()):
            now_or_never = (store.gone or store.fleeting) and not store.pinned
            if store.slots is None:
                if store.life != self._link.life:
                    del self._asked[store.number]
                    self._unpin(store)
                elif now_or_never or now_s - store.asked_s > (
                    PINNED_UNANSWERED_S_MAX if store.pinned else STORE_AGE_S_MAX
                ):
                    # Not when the answer comes: the engine may take no further step in which to do it.
                    del self._asked[store.number]
                    self._unpin(store)
                    self._give_back(store.number, len(store.device_blocks))
                continue
            del self._asked[store.number]
            places = [i for i, slot in enumerate(store.slots) if slot >= 0]
            if not places or store.life != self._link.life:
                self._unpin(store)
                continue
            if now_s - store.asked_s > STORE_AGE_S_MAX:
                self._unpin(store)
                self._give_back(store.number, len(places))
                continue
            store.planned_slots = len(places)
            whole = len(places) == len(store.slots)
            self._planned[store.number] = store
            plans.append(
                StorePlan(
                    store=store.number,
                    epoch=store.epoch,
                    slots=store.slots if whole else tuple(store.slots[i] for i in places),
                    generations=store.generations,
                    device_blocks=store.device_blocks
                    if whole
                    else tuple(store.device_blocks[i] for i in places),
                    nodes=self._link.nodes_of_store(store.number),
                )
            )
        return tuple(plans)

    def released(self) -> tuple[int, ...]:
        """Planned stores whose device blocks may be overwritten from this step on. Called once a step, after `plan`."""
        released = []
        now_s = self._clock()
        for store in self._planned.values():
            ended = (store.gone or store.fleeting) and not store.pinned
            if (ended or store.pinned) and now_s - store.asked_s > STORE_AGE_S_MAX:
                self._unpin(store)
                self._fail(store)
            elif ended:
                released.append(store.number)
            # Once: from the next step on its blocks are others'.
            store.gone = store.gone and store.pinned
        return tuple(released)

    def ended(self, request: str, held: bool = False) -> None:
        """The request gives all of its blocks back. While it holds them still (`held`), they are pinned as far as pins
        may go; of all others, the next step waits for the copies, and what has no slots by then is given up."""
        if self._by_request is None:
            self._by_request = {}
            for store in (*self._asked.values(), *self._planned.values()):
                self._by_request.setdefault(store.request, []).append(store)
        for store in self._by_request.get(request, ()):
            if store.number not in self._asked and store.number not in self._planned:
                continue
            store.gone = True
            if self._pin_all:
                continue
            if not held:
                self._unpin(store)
            elif not store.pinned and self._pins.has_room(len(store.device_blocks)):
                store.pinned = self._pins.pin(store.device_blocks)

    def give_up(self, request: str, begun: bool = False) -> bool:
        """Give up the request's stores that no plan has yet; with `begun`, no other one is committed either. Whether
        ranks may be copying its blocks."""
        for store in [each for each in self._asked.values() if each.request == request]:
            del self._asked[store.number]
            self._unpin(store)
            self._give_back(store.number, len(store.device_blocks))
        planned = [each for each in self._planned.values() if each.request == request]
        for store in planned if begun else ():
            self._fail(store)
        return bool(planned)

    def give_up_pins(self) -> bool:
        """The engine empties its cache, which it cannot while blocks are pinned: end all pins. True if there were any.

        The next step waits for the copies. Stores that have no slots yet are given up; so are all where the engine
        zeroes blocks: ranks may still read those, and what they read is not committed."""
        pinned = [store for store in (*self._asked.values(), *self._planned.values()) if store.pinned]
        for store in pinned:
            self._unpin(store)
            if store.slots is not None and not self._pin_all:
                continue
            if self._asked.pop(store.number, None) is not None:
                self._give_back(store.number, len(store.device_blocks))
            else:
                self._fail(store)
        return bool(pinned)

    def _unpin(self, store: _Store) -> None:
        if store.pinned:
            store.pinned = False
            self._pins.unpin(store.device_blocks)

    def _fail(self, store: _Store) -> None:
        """Nothing of a planned store is committed."""
        self._failed.setdefault(store.number, set()).update(range(store.planned_slots))

    def doubt(self) -> None:
        """KV may be wrong, or its keys are: no store that was asked for up to now is committed."""
        for store in self._asked.values():
            self._unpin(store)
            self._give_back(store.number, len(store.device_blocks))
        self._asked.clear()
        for store in self._planned.values():
            self._fail(store)

    def reported(self, report: StepReport) -> None:
        """Ranks finished stores; a store that all ranks finished is committed, if its blocks may still be kept."""
        now_s = self._clock()
        for number, (ranks, failed, seconds) in report.stored.items():
            store = self._planned.get(number)
            if store is None:
                continue
            store.ranks += ranks
            if failed:
                self._failed.setdefault(number, set()).update(failed)
            if store.ranks >= self._rank_count:
                del self._planned[number]
                bad = self._failed.pop(number, set())
                self._unpin(store)
                if store.keep is not None and not store.keep(now_s):
                    bad.update(range(store.planned_slots))
                if store.life == self._link.life:
                    done = Commit(
                        store=number, failed=tuple(sorted(bad)), seconds=seconds, answer_s=store.answer_s
                    )
                    self._link.send(done)

    def lost(self) -> None:
        """The session began anew: forget the stores of the one before."""
        life = self._link.life
        for store in (*self._asked.values(), *self._planned.values()):
            if store.life != life:
                self._unpin(store)
        self._asked = {n: s for n, s in self._asked.items() if s.life == life}
        self._planned = {n: s for n, s in self._planned.items() if s.life == life}
        self._failed = {n: f for n, f in self._failed.items() if n in self._planned}

    def _give_back(self, number: int, slot_count_max: int) -> None:
        self._link.send(Commit(store=number, failed=tuple(range(slot_count_max))))
