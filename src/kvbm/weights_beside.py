"""Digests of weight files that are made in a thread, while the engine loads the same files.

For loaders that read through the page cache: a device below is read once then. One thread only, because loading wants
the processors. What it has not done when the engine has loaded is done then, with all processors.

The thread decides nothing. It fills a memo, in which every file counts with its identity at that moment: whoever asks
the memo later gets a digest only for files that still are what they were.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from kvbm.strict import record_swallowed
from kvbm.weights import digest_by, open_memo
from kvbm.weights_memo import WeightsMemo

log = logging.getLogger("kvbm.weights")


class WeightsBeside:
    """Begins at once to digest the weights of `locations`. It keeps no process alive."""

    def __init__(self, locations: Iterable[Path], memo_path: Path) -> None:
        self.memo_path = memo_path
        self._locations = list(locations)
        self._loaded = threading.Event()
        self._memo: WeightsMemo | None = None
        self._thread = threading.Thread(target=self._run, name="kvbm-weights", daemon=True)
        self._thread.start()

    def finish(self) -> WeightsMemo:
        """The engine has loaded: do the rest with all processors, and return the memo, which is the caller's now."""
        self._loaded.set()
        self._thread.join()
        return self._memo if self._memo is not None else open_memo(self.memo_path)

    def _run(self) -> None:
        try:
            self._memo = open_memo(self.memo_path, beside=lambda: not self._loaded.is_set())
            digest_by(self._memo, self._locations)
        except Exception as error:  # of any kind: the files are looked at again when the engine has loaded
            record_swallowed(error)
            log.debug("no digests beside the load", exc_info=True)
