"""The end of spaces: queued blocks are written and tiers are released, those of all spaces within one deadline.

No tier waits for another one: all are looked at in turn while blocks are written, and each is released in a thread of
its own. What has not ended by the deadline is abandoned: a block that is not written by then is in no journal or index.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvbm.manager.below import Below
from kvbm.strict import record_swallowed
from kvbm.tiers.host import HostArena

log = logging.getLogger("kvbm.manager")

CLOSE_S_MAX = 4.0
"""All spaces of a manager are closed within so many seconds, also where a call to a tier does not end."""
RELEASE_S = 1.0
"""This much of it is kept for releasing tiers, after queued blocks were written."""
RELEASE_S_MIN = 0.05
LOOK_S = 0.02
"""How often tiers are looked at that blocks are written to."""


class Ending(Protocol):
    """A space, as far as it is closed here."""

    failure: str
    below: Below
    arena: HostArena

    def stop(self) -> None:
        """End leases and other work: only queued writes are left."""

    def catch_up(self) -> bool:
        """Do a slice of what leads to writes. False: nothing was left."""

    def move(self, until_s: float) -> bool:
        """Take completions and submit queued blocks. Whether something is left."""


def close_spaces(spaces: Sequence[Ending], keep: bool, deadline_s: float = CLOSE_S_MAX) -> None:
    """Write queued blocks and release all tiers and host memory; without `keep`, remove the blocks on disk."""
    end_s = time.monotonic() + deadline_s
    for space in spaces:
        space.stop()
    _queue_writes(spaces, end_s - deadline_s / 2)
    _write_queued(spaces, keep, end_s - RELEASE_S)
    threads = list[threading.Thread | None]()
    collects = list[Callable[[], object]]()
    for space in spaces:
        disk = space.below.disk
        if disk is not None:
            _void(space)
            threads.append(_close_beside(partial(disk.medium.close, keep), end_s))
            collects.append(disk.medium.poll)
        for side in space.below.remotes:
            threads.append(_close_beside(side.tier.close, end_s))
            collects.append(side.collect)
    for thread, collect in zip(threads, collects, strict=True):
        if _has_ended(thread, end_s):
            _try(collect)
    arenas = [_close_beside(partial(_close_arena, space.arena), end_s) for space in spaces]
    for thread in arenas:
        _has_ended(thread, end_s)


def drop_space(space: Ending, keep: bool) -> None:
    """Release a space while others are served. Nothing is waited for: what is queued is not written, and threads
    release tiers and host memory later."""
    end_s = time.monotonic()
    disk = space.below.disk
    if disk is not None:
        _void(space)
        _try(partial(disk.medium.close, keep, 0.0))
    for side in space.below.remotes:
        _close_beside(side.tier.close, end_s)
    _close_beside(partial(_close_arena, space.arena), end_s)


def _queue_writes(spaces: Sequence[Ending], until_s: float) -> None:
    """What the policies have yet to be told leads to writes, as far as there is time."""
    for space in spaces:
        while time.monotonic() < until_s and space.catch_up():
            pass
        while space.move(math.inf) and time.monotonic() < until_s:
            pass


def _write_queued(spaces: Sequence[Ending], keep: bool, until_s: float) -> None:
    waiting = [space for space in spaces if not space.failure]
    pause = threading.Event()
    if keep:
        for space in waiting:
            _try(space.below.flush)
    while waiting := [space for space in waiting if _try(space.below.write_more)]:
        left_s = until_s - time.monotonic()
        if left_s <= 0.0:
            return
        pause.wait(min(LOOK_S, left_s))


def _void(space: Ending) -> None:
    if space.below.disk is not None and not space.failure:
        _try(space.below.disk.void_emptied)


def _close_arena(arena: HostArena, _left_s: float) -> None:
    arena.close()


def _close_beside(close: Callable[[float], None], end_s: float) -> threading.Thread | None:
    """Call it with the seconds that are left, in a thread of its own. None where none is to be had: it has ended."""
    left_s = max(RELEASE_S_MIN, end_s - time.monotonic())
    thread = threading.Thread(target=_try, args=(partial(close, left_s),), name="kvbm-close", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("a tier is closed at once, without a thread: %s", error)
        _try(partial(close, RELEASE_S_MIN))
        return None
    return thread


def _has_ended(thread: threading.Thread | None, end_s: float) -> bool:
    """Whether this call of a `close` has ended, by that time."""
    if thread is None:
        return True
    thread.join(max(0.0, end_s - time.monotonic()))
    return not thread.is_alive()


def _try(step: Callable[[], object]) -> object:
    """What it returns; None where it fails, which keeps no other tier from its end."""
    try:
        return step()
    except Exception as error:
        record_swallowed(error)
        log.exception("a tier is not closed in order")
        return None
