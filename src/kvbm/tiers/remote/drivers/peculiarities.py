"""What is peculiar about a store has a line in the log, once, however many namespaces open it."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("kvbm.tiers.remote")


@functools.lru_cache(maxsize=64)
def say_once(place: str, note: str) -> None:
    """`note` is one of `BlobStore.notes`."""
    log.info("the store %s %s", place, note)
