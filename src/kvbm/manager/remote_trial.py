"""One trial of the remote store at the manager's start, so that a wrong one has a line before the first engine comes.

Tiers are opened with their namespaces. Here a thread of its own asks the store once: the start does not wait for it,
and whatever it finds is a line and nothing more, since a store that is away may come. Of a Mooncake Store the index
alone is asked: the pool would need this node's part in it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator

from kvbm.clock import Clock
from kvbm.errors import KvbmError
from kvbm.settings import Settings
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.named_store import open_named_store, store_field

log = logging.getLogger("kvbm.manager")

REQUEST_S = 10.0
END_S = 0.1
_NAME = f"{'0' * 64}/probe/start-"
"""Below the fingerprint of no model. What a trial that was killed has left is removed by the next collection."""


@contextlib.contextmanager
def remote_trial(
    settings: Settings,
    clock: Clock,
    open_store: Callable[[Settings, Clock, float], BlobStore] = open_named_store,
) -> Iterator[None]:
    """A trial of the store of these settings goes on meanwhile. One that has not ended is left behind."""

    def run() -> None:
        if fault := _fault(settings, clock, open_store):
            log.warning(
                "the store that %s names cannot be used now, and its hits are missing until it can: %s",
                store_field(settings),
                fault,
            )

    thread = threading.Thread(target=run, name="kvbm-remote-trial", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no thread is to be had
        log.warning("the remote store is not tried at the start, and is used all the same: %s", error)
        yield
        return
    try:
        yield
    finally:
        thread.join(END_S)


def _fault(
    settings: Settings, clock: Clock, open_store: Callable[[Settings, Clock, float], BlobStore]
) -> str:
    """Why the store cannot be read, or not be written to where that is wanted; empty where it can."""
    name = _NAME + secrets.token_hex(8)
    try:
        with contextlib.closing(open_store(settings, clock, REQUEST_S)) as store:
            store.read(name, 0, 1)
            if settings.remote_write:
                store.put(name, [b"x"])
                store.delete([name])
    except KvbmError as error:
        return str(error)
    return ""
