"""Long work in slices, so that the thread that owns the blocks looks at its sockets between them.

Work is a generator that yields after each slice. A slice handles a number of blocks that is known to take about a
millisecond, 5 ms at most, whatever the tiers hold. Its caller decides when the next one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

SLICE_BLOCKS = 128
"""Blocks that are indexed or forgotten in one slice: an eviction policy takes up to 20 microseconds for each."""

ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")


def at_once(work: Generator[None, None, ResultT]) -> ResultT:
    """The result of work that gives others no turn."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result


def advance(work: Generator[None, None, ResultT]) -> ResultT | None:
    """Go on with work until it gives others their turn, which is None, or ends."""
    try:
        next(work)
    except StopIteration as end:
        result: ResultT = end.value
        return result
    return None


def sliced(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    """Consecutive parts of so many items; the last one may be shorter."""
    return (items[start : start + size] for start in range(0, len(items), size))


def batches(items: Iterable[ItemT], size: int) -> Iterator[list[ItemT]]:
    """The same of items that come one after the other."""
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


class Backlog:
    """Work that can wait. All of it has its turns."""

    def __init__(self) -> None:
        self._work: deque[Iterator[None]] = deque()

    def __bool__(self) -> bool:
        """Whether something may be left."""
        return bool(self._work)

    def add(self, work: Iterator[None]) -> None:
        """Do this work too, from now on."""
        self._work.append(work)

    def clear(self) -> None:
        """Do none of it any more."""
        self._work.clear()

    def advance(self) -> bool:
        """Do one slice. False: nothing was left."""
        while self._work:
            work = self._work.popleft()
            if next(work, self) is not self:
                self._work.append(work)
                return True
        return False
