"""Whether this manager lives, and whether it is ready: what an orchestrator asks beside `/metrics`.

*Live* means that the loop turns. *Ready* means that engines can come and that every configured tier works; otherwise
the answer names the tier and says why. A tier is opened when the first engine of a namespace comes; until then the
disk's directory is looked at instead, so that one nobody can write to is found before an engine needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from kvbm.clock import Clock
from kvbm.layout import Namespace
from kvbm.manager.space import Space
from kvbm.observe.exporter import Answer
from kvbm.settings import Settings, variable

LIVE_PATH, READY_PATH = "/live", "/ready"
TURN_S_MAX = 60.0
"""A loop that has not turned for so long is dead. Its turns take milliseconds, and those in which a namespace gets its
host memory up to seconds: a process that is swapped out or stopped for a while is not restarted for that."""
LOOK_S = 0.5
"""The loop looks at its tiers for us so often, and when an operation of a disk has taken too long."""
REMOTE = "remote"
STOPPING = "it is stopping; queued blocks are being written"


class _Seen(NamedTuple):
    """What the loop saw last. `why` is why no engine can come; empty while they can."""

    why: str
    opened: bool = False
    faults: tuple[tuple[str, str], ...] = ()


class Probes:
    """`live` and `ready` are called by the exporter's threads; all else belongs to the manager's.

    What goes from one to the other is replaced as a whole, so that no lock is needed.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._disk_dir = settings.disk_dir if settings.disk_on else ""
        on = {"host": settings.host_on, "disk": settings.disk_on, REMOTE: settings.remote_on}
        self._tiers = [name for name, there in on.items() if there]
        self._clock = clock
        self._turned_at_s = clock()
        self._look_at_s = 0.0
        self._seen = _Seen("it is starting")

    # ---- the exporter's threads

    def live(self) -> Answer:
        """200 while the loop turns, and while queued blocks are written at the end, which is bounded."""
        still_s = self._clock() - self._turned_at_s
        if still_s > TURN_S_MAX and self._seen.why != STOPPING:
            return Answer(503, f"dead: the loop has not turned for {still_s:.0f} s\n")
        return Answer(200, "live\n")

    def ready(self) -> Answer:
        """200 while engines can come and all tiers of this node work; else 503, with a line for each reason.

        A store of many nodes that is away has a line and makes none of them unready: its hits are missing, and no more.
        """
        seen = self._seen
        if seen.why:
            return Answer(503, f"not ready: {seen.why}\n")
        faults = list(seen.faults)
        if not seen.opened and self._disk_dir and (fault := _unwritable(self._disk_dir)):
            faults.append(("disk", fault))
        off = {tier for tier, _ in faults}
        lines = [f"{tier}: {fault}" for tier, fault in faults]
        lines += [f"{tier}: works" for tier in self._tiers if tier not in off]
        unready = bool(off - {REMOTE})
        return Answer(503 if unready else 200, "\n".join(["not ready" if unready else "ready", *lines, ""]))

    # ---- the manager's thread

    def turn_ended(self, spaces: Iterable[tuple[Namespace, Space]]) -> None:
        """A turn of the loop is over. The first one says that the socket is there."""
        self._turned_at_s = now_s = self._clock()
        if now_s >= self._look_at_s:
            there = list(spaces)
            self._look_at_s = now_s + min([LOOK_S, *(space.below.wait_s_max for _, space in there)])
            self._seen = _Seen(
                "", bool(there), tuple(fault for each in there for fault in self._faults(*each))
            )

    def stopping(self) -> None:
        """No engine can come any more. Queued blocks may still be written."""
        self._seen = _Seen(STOPPING)

    def _faults(self, namespace: Namespace, space: Space) -> list[tuple[str, str]]:
        """(tier, why it does not work). A space that failed has no tier left."""
        if space.failure:
            return [(tier, f"namespace {namespace.short} is off: {space.failure}") for tier in self._tiers]
        faults = [("disk", space.disk.trouble)] if space.disk is not None else []
        faults += [(REMOTE, remote.fault) for remote in space.remotes]
        return [(tier, f"namespace {namespace.short}: {fault}") for tier, fault in faults if fault]


def _unwritable(directory: str) -> str:
    """Why the disk's directory cannot be used or made; empty when it can."""
    path = os.path.abspath(directory)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK):
        return ""
    return f"{variable('disk_dir')}={directory}: {path} is no directory that user {os.geteuid()} can write to"
