"""What fails again and again in a rank: told in full once, then counted."""

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
    told: int = 0
    last: str = ""


class FailureLog:
    """The failures of one thread, by kind and by where in the code they arose.

    The first of each is told with all there is to it. Those after it are summed up in one line whenever their number
    has doubled, and when the log is closed.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def tell(self, kind: str, error: Exception, blocks: int = 0, then: str = "") -> None:
        """Something of `kind` failed, for `blocks` blocks where it is about those; `then` is what follows from that.

        One line for what a device or a driver refuses; the whole story for a defect of ours.
        """
        count = self._count(kind, error)
        count.times += 1
        count.blocks += blocks
        refused = isinstance(error, (KvbmError, RuntimeError))
        count.last = str(error).partition("\n")[0] if refused else f"{type(error).__name__}: {error}"
        if count.times > 1:
            if count.times >= 2 * count.told:
                self._sum_up(kind, count)
            return
        count.told = 1
        what = f"{kind} of {blocks} blocks" if blocks else kind
        if refused:
            log.warning("%s failed: %s%s", what, count.last, then)
        else:
            log.error("%s failed%s", what, then, exc_info=error)

    def close(self) -> None:
        """Say what was counted and not yet told."""
        for (kind, _), count in self._counts.items():
            if count.times > count.told:
                self._sum_up(kind, count)
        self._counts.clear()

    def _count(self, kind: str, error: Exception) -> _Count:
        """The same line of code may fail with other words each time: where it is says what kind of failure it is."""
        trace, place = error.__traceback__, type(error).__name__
        while trace is not None:
            if trace.tb_next is None:
                place += f" {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        if len(self._counts) >= KINDS_MAX and (kind, place) not in self._counts:
            place = ""
        return self._counts.setdefault((kind, place), _Count())

    def _sum_up(self, kind: str, count: _Count) -> None:
        count.told = count.times
        blocks = f", {count.blocks} blocks" if count.blocks else ""
        log.warning("%s failed %d times by now%s; the last: %s", kind, count.times, blocks, count.last)
