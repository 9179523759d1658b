"""Failures that repeat in a rank: the first of a kind is logged in full, the later ones are counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvbm.errors import KvbmError

log = logging.getLogger("kvbm.worker")

KINDS_MAX = 64


@dataclass(slots=True)
class _Count:
    times: int = 0
    blocks: int = 0
    logged: int = 0
    last: str = ""


class FailureLog:
    """The failures of one thread, by kind and by the line of code that raised them.

    The first of each is logged in full. The later ones are counted; one line gives their number whenever it has
    doubled, and when the log is closed.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def log_failure(self, kind: str, error: Exception, blocks: int = 0, then: str = "") -> None:
        """Log that an operation of this kind failed, for so many blocks; `then` is added to the line.

        An error of a device or a driver is one line, a defect of ours has its traceback.
        """
        count = self._count(kind, error)
        count.times += 1
        count.blocks += blocks
        refused = isinstance(error, (KvbmError, RuntimeError))
        count.last = str(error).partition("\n")[0] if refused else f"{type(error).__name__}: {error}"
        if count.times > 1:
            if count.times >= 2 * count.logged:
                self._sum_up(kind, count)
            return
        count.logged = 1
        what = f"{kind} of {blocks} blocks" if blocks else kind
        if refused:
            log.warning("%s failed: %s%s", what, count.last, then)
        else:
            log.error("%s failed%s", what, then, exc_info=error)

    def close(self) -> None:
        """Log the numbers that no line has given yet."""
        for (kind, _), count in self._counts.items():
            if count.times > count.logged:
                self._sum_up(kind, count)
        self._counts.clear()

    def _count(self, kind: str, error: Exception) -> _Count:
        """Failures are told apart by their line of code: the message of one failure may differ each time."""
        trace, place = error.__traceback__, type(error).__name__
        while trace is not None:
            if trace.tb_next is None:
                place += f" {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        if len(self._counts) >= KINDS_MAX and (kind, place) not in self._counts:
            place = ""
        return self._counts.setdefault((kind, place), _Count())

    def _sum_up(self, kind: str, count: _Count) -> None:
        count.logged = count.times
        blocks = f", {count.blocks} blocks" if count.blocks else ""
        log.warning("%s failed %d times by now%s; the last: %s", kind, count.times, blocks, count.last)
