"""Which requests are looked up now: those next in line, as long as their leases keep to a share of host memory.

A lookup leases the blocks that it finds, and starts reads from disk. If every queued request did that, thousands of
them would pin all of host memory, and stores would be refused exactly then. So a request is looked up when it arrives
if the window has room, and otherwise waits until those before it have gone on.

The order in which the engine asks shows which requests it would run next. A request that is asked about again while the
window is full takes the room of one that the engine has not asked about since it last asked about this one. If there is
none, it is the next to enter: shorter ones do not overtake it, or a stream of them would keep a long one out for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice


class Window:
    """The lookups that may hold leases, counted in blocks, and the requests that wait for room.

    `capacity` is in blocks; 0 is no bound. One request is let in whatever its length. Owned by the engine's thread;
    every call costs O(1), but `asked_about` of the request that is to enter next goes through the open lookups.
    """

    def __init__(self) -> None:
        self.capacity = 0
        # Lookups whose load has not begun, with their blocks: the one that was asked about longest ago is first, and
        # of those that never were, the youngest.
        self._open: OrderedDict[str, int] = OrderedDict()
        # Lookups whose load runs: they cannot be given up.
        self._loading: dict[str, int] = {}
        self._held = 0
        # Requests that are not looked up, with their blocks, in order of arrival.
        self._waiting: OrderedDict[str, int] = OrderedDict()
        # When the engine last asked about a request; the clock counts its questions.
        self._asked_at: dict[str, int] = {}
        self._questions = 0
        # One of those that wait, or None: it was asked about again, and nobody enters before it.
        self._next: str | None = None
        self._moved = False

    def __len__(self) -> int:
        """Requests that are known here."""
        return len(self._open) + len(self._loading) + len(self._waiting)

    @property
    def held_blocks(self) -> int:
        """Blocks of the lookups that are open, or whose load runs."""
        return self._held

    def has_room(self, request: str, blocks: int) -> bool:
        """Whether a lookup of so many blocks may be sent now for the request."""
        if not self.capacity:
            return True
        fits = not self._open or self._held + blocks <= self.capacity
        return fits and self._next in (None, request)

    def wait(self, request: str, blocks: int) -> None:
        """The request, which may find so many blocks, is not looked up yet."""
        self._waiting[request] = blocks

    def waits(self, request: str) -> bool:
        """Whether the request waits for room."""
        return request in self._waiting

    def next_waiting(self) -> str | None:
        """The request that is to enter next, or else the one that has waited longest, if there is room for it now."""
        request = self._next or next(iter(self._waiting), None)
        return request if request is not None and self.has_room(request, self._waiting[request]) else None

    def enter(self, request: str, blocks: int) -> None:
        """The request is looked up, and may find so many blocks."""
        self._wait_no_more(request)
        self._held += blocks - self._open.get(request, 0)
        keeps_place = request in self._open or request in self._asked_at
        self._open[request] = blocks
        if not keeps_place:
            self._open.move_to_end(request, last=False)

    def found(self, request: str, blocks: int) -> None:
        """The lookup was answered: it holds so many blocks."""
        if request in self._open:
            self._held += blocks - self._open[request]
            self._open[request] = blocks

    def begin(self, request: str) -> None:
        """The request's load begins."""
        if request in self._open:
            self._loading[request] = self._open.pop(request)
            self._moved = True

    def leave(self, request: str) -> None:
        """The request's lookup has ended."""
        if request in self._loading:
            self._asked_at.pop(request, None)  # the engine asks about it no more, or all anew
        self._held -= self._open.pop(request, 0) + self._loading.pop(request, 0)

    def forget(self, request: str) -> None:
        """The request has gone, or is computed without us."""
        self._moved = True
        self.leave(request)
        self._wait_no_more(request)
        self._asked_at.pop(request, None)

    def asked_about(self, request: str) -> list[str]:
        """The engine asks about this request: it would run it next.

        Returns the requests whose lookups are to be given up for it, where it waits and the window is full.
        """
        waits = request in self._waiting
        if not waits and request not in self._open:
            return []
        self._questions += 1
        before, self._asked_at[request] = self._asked_at.get(request, 0), self._questions
        if not waits:
            self._open.move_to_end(request)
            return []
        if before and (self._next is None or self._asked_at.get(self._next, 0) < before):
            self._next = request
        return self._displaced_by(self._waiting[request], before) if self._next == request else []

    def passes_over(self, request: str) -> bool:
        """The engine asks about this request again. Whether nothing changes by that, as `asked_about` would: it is
        looked up, or waits behind another one that the engine has asked about meanwhile."""
        if request in self._open:
            self._open.move_to_end(request)
        else:
            before = self._asked_at.get(request, 0)
            behind = self._next is not None and self._next != request and request in self._waiting
            if not (before and behind and self._asked_at.get(self._next or "", 0) >= before):
                return False
        self._questions += 1
        self._asked_at[request] = self._questions
        return True

    def next_open(self, count: int) -> list[str]:
        """Requests that are looked up, those that the engine would run next first."""
        return list(islice(reversed(self._open), count))

    def take_moved(self) -> bool:
        """Whether the engine has gone on with a request since the last call: others are next."""
        moved, self._moved = self._moved, False
        return moved

    def _wait_no_more(self, request: str) -> None:
        self._waiting.pop(request, None)
        if self._next == request:
            self._next = None

    def _displaced_by(self, blocks: int, before: int) -> list[str]:
        """The open lookups that make room for so many blocks, if none of them was asked about since `before`."""
        held, displaced = self._held, list[str]()
        for request, held_blocks in self._open.items():
            if not self.capacity or held + blocks <= self.capacity:
                break
            if self._asked_at.get(request, 0) >= before:
                return []
            displaced.append(request)
            held -= held_blocks
        return displaced
