"""Takes in the ranks' reports while the engine has nothing to do: its last blocks need no further step."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

log = logging.getLogger("kvbm.trtllm")

PAUSE_S = 0.02


class Settling:
    """A thread that calls `settle` every `PAUSE_S` from `wake` on, until it says that nothing more is to come.

    `settle` returns True while there is; it takes what lock it needs. The thread keeps no process alive, and ends when
    whoever made it has gone.
    """

    def __init__(self, settle: Callable[[], bool]) -> None:
        """`settle` is a method: its object is not kept alive."""
        self._settle = weakref.WeakMethod(settle)
        self._work = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There may be something to take in."""
        self._work.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvbm-settling", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            self._work.wait()
            if self._closed.wait(PAUSE_S):
                return
            settle = self._settle()
            if settle is None:
                return
            self._work.clear()
            if settle():
                self._work.set()
            del settle
