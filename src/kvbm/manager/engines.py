"""Which sessions belong to which engine, and the fences that keep slots safe from late writers.

A worker that is slow, stopped or cut off may still be copying into slots that were reserved for it. Such slots
go back to the pool only when every worker of that engine has answered a *fence*, or is gone: a socket
that the other end closed means a dead process, and a dead process writes no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from kvbm.manager.leases import Reservation
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.protocol import Fence


@dataclass(slots=True, eq=False)
class Engine:
    """One engine: a leader and `rank_count` workers that share a space."""

    name: str
    rank_count: int
    space: Space
    leader: Session | None = None
    workers: dict[int, Session] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """All ranks are attached."""
        return len(self.workers) == self.rank_count

    @property
    def empty(self) -> bool:
        return self.leader is None and not self.workers


@dataclass(slots=True)
class _PendingFence:
    engine: Engine
    reservations: list[Reservation]
    waiting_for: set[int]


class Fences:
    """Reservations that were condemned and wait for their workers."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, _PendingFence] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def raise_for(self, engine: Engine, reservations: list[Reservation]) -> None:
        """Condemn the reservations; their slots go back once the engine's workers have answered or gone."""
        if not reservations:
            return
        for reservation in reservations:
            engine.space.condemn(reservation)
        number = next(self._numbers)
        pending = _PendingFence(engine, reservations, set())
        self._pending[number] = pending
        for worker in engine.workers.values():
            self._send(number, pending, worker)
        self._settle(number, pending)

    def joined(self, engine: Engine, worker: Session) -> None:
        """A worker attached: it may be one that was here before, with stores of that time still before it."""
        for number, pending in self._pending.items():
            if pending.engine.name == engine.name:
                self._send(number, pending, worker)

    def answered(self, number: int, session: Session) -> None:
        """A worker is past the fence."""
        pending = self._pending.get(number)
        if pending is not None and session.hello is not None and session.hello.engine == pending.engine.name:
            pending.waiting_for.discard(session.hello.rank)
            self._settle(number, pending)

    def gone(self, session: Session) -> None:
        """A worker's session ended. If its process did, it is past every fence.

        A session that *we* ended says nothing about the process: it comes back and is asked again.
        """
        if not session.ended_by_peer or session.hello is None:
            return
        for number, pending in list(self._pending.items()):
            if pending.engine.name == session.hello.engine:
                pending.waiting_for.discard(session.hello.rank)
                self._settle(number, pending)

    def _send(self, number: int, pending: _PendingFence, worker: Session) -> None:
        assert worker.hello is not None
        pending.waiting_for.add(worker.hello.rank)
        worker.send(Fence(fence=number, stores=tuple(r.number for r in pending.reservations)))

    def _settle(self, number: int, pending: _PendingFence) -> None:
        if not pending.waiting_for:
            del self._pending[number]
            for reservation in pending.reservations:
                pending.engine.space.abort(reservation)
