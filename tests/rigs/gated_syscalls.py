"""A kernel whose calls wait at a gate, as on a filesystem that freezes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kvbm.testing.stored_runs import DEADLINE_S
from kvbm.tiers.disk.syscalls import Syscalls

OPERATIONS = tuple(name for name, each in vars(Syscalls).items() if callable(each) and name[0] != "_")


class GatedSyscalls(Syscalls):
    """The real kernel, with a gate before every call. `on_call` is called before each with its name."""

    def __init__(self, on_call: Callable[[str], None] = lambda operation: None) -> None:
        self._on_call = on_call
        self._lock = threading.Lock()
        self._closed: tuple[str, str] | None = None
        self._calls_max = 0
        self._opened = threading.Event()
        self._entered = threading.Semaphore(0)
        for name in OPERATIONS:
            setattr(self, name, partial(self._call, name))

    def shut(self, operation: str = "", file: str = "", calls_max: int = 1 << 30) -> None:
        """From now on the next `calls_max` calls of `operation` (any, where it is empty) on files whose name contains
        `file` wait."""
        with self._lock:
            self._opened.clear()
            self._closed, self._calls_max = (operation, file), calls_max

    def wait_entered(self) -> None:
        """Wait until a call waits at the gate."""
        assert self._entered.acquire(timeout=DEADLINE_S), "no call came to the gate"

    def open_gate(self) -> None:
        """All calls go on."""
        with self._lock:
            self._closed = None
            self._opened.set()

    def _call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        self._on_call(operation)
        if self._waits(operation, args):
            self._entered.release()
            assert self._opened.wait(DEADLINE_S), "the gate stayed shut"
        return getattr(super(), operation)(*args, **kwargs)

    def _waits(self, operation: str, args: tuple[Any, ...]) -> bool:
        with self._lock:
            if self._closed is None or self._closed[0] not in ("", operation) or not self._calls_max:
                return False
            subject = args[0]
            name = os.readlink(f"/proc/self/fd/{subject}") if isinstance(subject, int) else str(subject)
            waits = self._closed[1] in os.path.basename(name) or self._closed[1] in name
            self._calls_max -= waits
            return waits
