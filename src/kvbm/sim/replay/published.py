"""Published eviction policies to compare with, as libCacheSim has them (the package `libcachesim`).

They choose among independent objects, so a block may go before those that continue it; it counts as a hit only where
everything before it is there too, as in every replay. A request touches its blocks from the last to the first: a
policy that goes by order of use then evicts leaves first by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import takewhile

from kvbm.errors import SettingsError
from kvbm.sim.replay.replay import Replay
from kvbm.sim.traces.trace import PROGRESS_REQUESTS, Trace

_PREFIX = "libcachesim:"
_CLASSES = {
    "lru": "LRU",
    "s3fifo": "S3FIFO",
    "sieve": "Sieve",
    "arc": "ARC",
    "tinylfu": "WTinyLFU",
    "gdsf": "GDSF",
}
NAMES = tuple(_PREFIX + name for name in _CLASSES)
"""Their names on the command line."""


def require_library(name: str) -> None:
    """Raises SettingsError where libCacheSim cannot be imported; `name` is one of `NAMES`."""
    try:
        importlib.import_module("libcachesim")
    except ImportError as error:
        accepted = f"a policy whose package can be imported (pip install libcachesim; {error})"
        raise SettingsError("--policy", name, accepted) from None


def published_replay(
    trace: Trace, name: str, capacity: int, on_progress: Callable[[int], None] = lambda requests: None
) -> Replay:
    """Replay through a tier of `capacity` blocks by one of `NAMES`. Arguments and answer as in `replay`."""
    library = importlib.import_module("libcachesim")
    cache = getattr(library, _CLASSES[name.removeprefix(_PREFIX)])(capacity)
    wanted = library.Request()
    wanted.obj_size = 1

    def is_held(block: int) -> bool:
        wanted.obj_id = block + 1
        return cache.find(wanted, False) is not None

    hits_by_request: list[int] = []
    inserted = 0
    for number, request in enumerate(trace.requests):
        hits_by_request.append(sum(1 for _ in takewhile(is_held, request.blocks)))
        for block in reversed(request.blocks):
            wanted.obj_id = block + 1
            inserted += not cache.get(wanted)
        if number % PROGRESS_REQUESTS == 0:
            on_progress(number)
    on_progress(len(trace.requests))
    evicted = inserted - cache.get_n_obj()
    return Replay(trace.accesses, sum(hits_by_request), inserted, evicted, tuple(hits_by_request))
