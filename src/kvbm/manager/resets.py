"""Resets whose blocks were dropped, and whose answer waits until no disk gives them back after a crash."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbm.clock import Clock
from kvbm.manager.disk_side import DiskSide
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.protocol import ResetReply

WAIT_S_MAX = 5.0
WAITING_MAX = 64


@dataclass(frozen=True, slots=True)
class _Waiting:
    session: Session
    dropped: int
    in_use: int
    disks: tuple[tuple[DiskSide, int], ...]
    until_s: float

    def reason(self) -> str:
        """Why blocks may come back after a crash; empty when none can."""
        undone = [disk for disk, number in self.disks if disk.medium.synced < number]
        return (undone[0].trouble or "the disk has not answered yet") if undone else ""


@dataclass(slots=True, eq=False)
class Resets:
    """Answers resets, each within `WAIT_S_MAX`. Owned by the manager's thread."""

    clock: Clock
    _waiting: deque[_Waiting] = field(default_factory=deque, init=False)

    def note(self, session: Session, spaces: Iterable[Space], dropped: int, in_use: int) -> None:
        """Blocks of these spaces were dropped: answer the session that asked for it when that is durable."""
        disks = tuple((space.disk, space.disk.sync()) for space in spaces if space.disk is not None)
        self._waiting.append(_Waiting(session, dropped, in_use, disks, self.clock() + WAIT_S_MAX))
        while len(self._waiting) > WAITING_MAX:
            _answer(self._waiting.popleft())
        self.answer()

    def answer(self) -> None:
        """Answer those whose blocks cannot come back, and those that have waited long enough; in each turn."""
        if self._waiting:
            now_s, due = self.clock(), deque[_Waiting]()
            for each in self._waiting:
                if each.reason() and now_s < each.until_s:
                    due.append(each)
                else:
                    _answer(each)
            self._waiting = due


def _answer(waiting: _Waiting) -> None:
    waiting.session.send(ResetReply(dropped=waiting.dropped, in_use=waiting.in_use, undone=waiting.reason()))
