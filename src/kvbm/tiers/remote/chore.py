"""A chore: work that is done now and then in a thread of its own, because it waits for a store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.tiers.remote.tier")


class Chore:
    """`work` runs once for each `start`, never twice at the same time. The thread begins with the first one."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name = name
        self._work = work
        self._changed = threading.Condition()
        self._wanted = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether it is being done, or is about to."""
        return self._wanted

    def start(self) -> None:
        """Do it, unless it is being done."""
        with self._changed:
            if self._wanted or self._stopping:
                return
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"kvbm-remote-{self._name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until it is not being done."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._wanted, max(0.0, deadline_s))

    def stop(self) -> None:
        """Do it no more; the thread ends when it is done."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stopping)
                if not self._wanted:
                    return
            try:
                self._work()
            except Exception as error:
                record_swallowed(error)
                log.exception("remote tier: a defect in %s", self._name)
            with self._changed:
                self._wanted = False
                self._changed.notify_all()
                if self._stopping:
                    return
