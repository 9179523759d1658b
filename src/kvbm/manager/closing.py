"""The end of spaces: queued blocks are written and tiers are released, those of all spaces within one deadline.

No tier waits for another one: all are looked at in turn while blocks are written, and each is released in a thread of
its own. What has not ended by the deadline is abandoned: a block that is not written by then is in no journal or index.
"""

from __future__ import annotations

import logging
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
AT_ONCE = 0.0
"""As a deadline: nothing is written, and tiers are released by threads of theirs, later."""
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


def close_spaces(spaces: Sequence[Ending], keep: bool, deadline_s: float = CLOSE_S_MAX) -> None:
    """Write queued blocks and release all tiers and host memory; without `keep`, remove the blocks on disk."""
    end_s = time.monotonic() + deadline_s
    for space in spaces:
        space.stop()
    if deadline_s > AT_ONCE:
        _write_queued(spaces, keep, end_s - RELEASE_S)
    _release(spaces, keep, end_s, deadline_s)
    for space in spaces:
        _try(space.arena.close)


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


def _release(spaces: Sequence[Ending], keep: bool, end_s: float, deadline_s: float) -> None:
    threads = list[tuple[threading.Thread, Callable[[], object]]]()
    for space in spaces:
        disk = space.below.disk
        if disk is not None:
            if not space.failure:
                _try(disk.void_emptied)
            if deadline_s <= AT_ONCE:
                _try(partial(disk.medium.close, keep, 0.0))
            else:
                threads.append((_thread(partial(disk.medium.close, keep), end_s), disk.medium.poll))
        threads += [(_thread(side.tier.close, end_s), side.collect) for side in space.below.remotes]
    for thread, collect in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
        if not thread.is_alive():
            _try(collect)


def _thread(close: Callable[[float], None], end_s: float) -> threading.Thread:
    left_s = max(RELEASE_S_MIN, end_s - time.monotonic())
    thread = threading.Thread(target=_try, args=(partial(close, left_s),), name="kvbm-close", daemon=True)
    thread.start()
    return thread


def _try(step: Callable[[], object]) -> object:
    """What it returns; None where it fails, which keeps no other tier from its end."""
    try:
        return step()
    except Exception as error:
        record_swallowed(error)
        log.exception("a tier is not closed in order")
        return None
