"""Engines with their sessions, and the fences that keep slots safe from late writers.

A worker that is slow, stopped or cut off may still be copying into slots that were reserved for it. Such slots
go back to the pool only when every session of a worker of that engine has answered a *fence*, or was closed by the
other end: a dead process writes no more, and a live one closes its socket between two copies. A session that *we*
ended says nothing, so it counts until the other end has closed it too (`Engine.leaving`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from kvbm.manager.leases import Owner, Reservation
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.observe.metric_table import OTHER_ENGINES
from kvbm.protocol import Fence


@dataclass(slots=True, eq=False)
class Engine:
    """One engine, or the part of it that is on this node: a leader and the workers of these `ranks` that share a space.

    `leaving` has the workers' sessions, by number, that are served no more and whose other end is still open.
    `announced` has the tiers in the latest message to its leader, `lease_blocks` its share of host memory there. Ranks
    have been missing since `incomplete_s`, if any are; `missed` has those that were last named since then. `label` is
    its name in metrics.
    """

    name: str
    rank_count: int
    ranks: tuple[int, ...]
    space: Space
    incomplete_s: float
    leader: Session | None = None
    workers: dict[int, Session] = field(default_factory=dict)
    leaving: dict[Owner, Session] = field(default_factory=dict)
    announced: dict[str, int] = field(default_factory=dict)
    lease_blocks: int = 0
    missed: tuple[int, ...] = ()
    label: str = OTHER_ENGINES
    part: int = 0
    part_count: int = 1

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that are not attached."""
        return tuple(rank for rank in self.ranks if rank not in self.workers)

    @property
    def ready(self) -> bool:
        """All ranks of this node are attached, and the space works."""
        return len(self.workers) == len(self.ranks) and not self.space.failure

    @property
    def empty(self) -> bool:
        return self.leader is None and not self.workers and not self.leaving


@dataclass(slots=True)
class _PendingFence:
    engine: Engine
    reservations: list[Reservation]
    waiting_for: set[Owner]


class Fences:
    """Condemned reservations, each until the workers of its engine are past it."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, _PendingFence] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def raise_for(self, engine: Engine, reservations: list[Reservation]) -> None:
        """Condemn the reservations. Their slots are freed once the engine's workers have answered or gone."""
        if not reservations:
            return
        for reservation in reservations:
            reservation.condemned = True
        number = next(self._numbers)
        pending = _PendingFence(engine, reservations, set(engine.leaving))
        self._pending[number] = pending
        for worker in engine.workers.values():
            self._send(number, pending, worker)
        self._abort_if_passed(number, pending)

    def joined(self, engine: Engine, worker: Session) -> None:
        """A worker attached. It may have been here before, and still have stores of that time to do."""
        for number, pending in self._pending.items():
            if pending.engine.name == engine.name:
                self._send(number, pending, worker)

    def answered(self, number: int, session: Session) -> None:
        """A worker is past the fence."""
        pending = self._pending.get(number)
        if pending is not None:
            pending.waiting_for.discard(session.number)
            self._abort_if_passed(number, pending)

    def ended(self, session: Session) -> None:
        """The other end of a session has closed it: no worker writes through it any more."""
        for number, pending in list(self._pending.items()):
            pending.waiting_for.discard(session.number)
            self._abort_if_passed(number, pending)

    def _send(self, number: int, pending: _PendingFence, worker: Session) -> None:
        pending.waiting_for.add(worker.number)
        worker.send(Fence(fence=number, stores=tuple(r.number for r in pending.reservations)))

    def _abort_if_passed(self, number: int, pending: _PendingFence) -> None:
        if not pending.waiting_for:
            del self._pending[number]
            pending.engine.space.abort_later(pending.reservations)
