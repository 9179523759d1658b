"""What a page of metrics counts: all that engines had done when it was asked for.

Whoever reads the page after an engine's answer expects that request in it. The exporter's threads ask, and the loop
answers in three steps:

1. It handles the messages that had arrived by then. Those about loads are among them: an engine reports a load before
   it runs the request.
2. It waits for the stores that were under way, `STORES_WAIT_S` at most. An engine begins to copy the last blocks of a
   request when its answer is on its way already.
3. It brings the gauges up to date.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
from collections.abc import Callable, Collection, Iterable

from kvbm.clock import Clock
from kvbm.manager.leases import Owner, Reservation
from kvbm.manager.space import Space
from kvbm.observe.exposition import render
from kvbm.observe.metrics import Metrics

STORES_WAIT_S = 0.25
"""The most that a page waits for stores. The longest wait seen on a busy machine with two cores was 0.1 s."""
ANSWER_S_MAX = 1.0
"""A page is late by so much at most, where the loop is in a long turn; then it shows what is known."""


class _Question:
    """A page that was asked for. `behind` are the sessions whose messages may be older and are not handled yet."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.deadline_s = math.inf
        self.behind: set[Owner] | None = None
        self._stores: list[tuple[Space, Reservation]] | None = None

    def is_due(self, now_s: float, unread: Collection[Owner], spaces: Iterable[Space]) -> bool:
        """Whether all that it waits for has happened, or its time is over. Called once a turn."""
        self.behind = self.behind.intersection(unread) if self.behind is not None else set(unread)
        if not self.behind:
            if self._stores is None:
                self._stores = [(space, store) for space in spaces for store in space.reservations]
            while self._stores and not _under_way(*self._stores[-1]):
                self._stores.pop()
            if not self._stores:
                return True
        return now_s >= self.deadline_s


def _under_way(space: Space, store: Reservation) -> bool:
    """Whether its engine may still commit the store."""
    held = space.reservations.get(store.owner, store.number) is store
    return held and not store.condemned and not space.failure


class Scrapes:
    """`page` is called by the exporter's threads; all else belongs to the manager's."""

    def __init__(self, metrics: Metrics, clock: Clock, answer_s_max: float = ANSWER_S_MAX) -> None:
        self._metrics, self._clock, self._answer_s_max = metrics, clock, answer_s_max
        self._asked: queue.SimpleQueue[_Question] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._open: list[_Question] = []
        self._closed = False

    # ---- the exporter's threads

    def page(self) -> str:
        """The metrics; they count what was done before the call."""
        if not self._closed:
            question = _Question()
            self._asked.put(question)
            with contextlib.suppress(OSError):  # so much waits that the loop wakes up anyway, or it has ended
                self._writer.send(b"?")
            question.answered.wait(self._answer_s_max)
        return render(self._metrics)

    # ---- the manager's thread

    def fileno(self) -> int:
        """Readable while there are questions to `take`."""
        return self._reader.fileno()

    @property
    def open_count(self) -> int:
        """How many questions wait for their answers."""
        return len(self._open)

    @property
    def wait_s_max(self) -> float:
        """How long the next turn may wait: not at all while older messages may have to be read."""
        if not self._open:
            return math.inf
        if any(question.behind for question in self._open):
            return 0.0
        return max(0.0, min(question.deadline_s for question in self._open) - self._clock())

    def take(self) -> None:
        """Take the questions that came."""
        with contextlib.suppress(BlockingIOError):  # nothing was signalled
            self._reader.recv(64)
        with contextlib.suppress(queue.Empty):  # that was the last one
            while True:
                question = self._asked.get_nowait()
                question.deadline_s = self._clock() + STORES_WAIT_S
                self._open.append(question)

    def turn_ended(
        self, unread: Collection[Owner], spaces: Iterable[Space], publish: Callable[[], None]
    ) -> None:
        """Answer what is due, after `publish` has brought the gauges up to date.

        Sessions in `unread` had messages when the turn began; they may have more.
        """
        now_s, spaces = self._clock(), list(spaces)
        due = [question for question in self._open if question.is_due(now_s, unread, spaces)]
        if due:
            publish()
            self._open = [question for question in self._open if question not in due]
            for question in due:
                question.answered.set()

    def close(self) -> None:
        """Let nobody wait any more. Twice is no error."""
        if self._closed:
            return
        self._closed = True
        self.take()
        for question in self._open:
            question.answered.set()
        self._open.clear()
        self._reader.close()
        self._writer.close()
