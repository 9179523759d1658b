"""Python's collection of reference cycles, kept out of the manager's turns.

It looks at every list that came since the last time, and leases of long requests have thousands of entries: one
collection can take longer than answering ten requests. Requests leave no cycles behind, so that it is only needed now
and then, and happens when nobody waits.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from kvbm.clock import Clock

COLLECT_EVERY_S = 60.0
COLLECT_AT_THE_LATEST_S = 600.0
"""An installed policy or tier may leave cycles behind, and a manager may have work without a pause."""


@contextlib.contextmanager
def collected_when_idle(clock: Clock) -> Iterator[Callable[[bool], None]]:
    """Gives a function to be called after every turn, with whether there is nothing left to do."""
    gc.collect()
    gc.freeze()  # what was imported and made by now stays
    gc.disable()
    collected_s = clock()

    def turn_ended(idle: bool) -> None:
        nonlocal collected_s
        if clock() - collected_s >= (COLLECT_EVERY_S if idle else COLLECT_AT_THE_LATEST_S):
            gc.collect()
            collected_s = clock()

    try:
        yield turn_ended
    finally:
        gc.unfreeze()
        gc.enable()
