"""A manager that serves in a thread of the test's process: what a library client, which waits for answers, needs."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from kvbm.clock import Clock, monotonic
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.server import Server
from kvbm.manager.space import Space
from kvbm.manager.traffic import Traffic
from kvbm.observe.metrics import Metrics
from kvbm.settings import Settings

DEADLINE_S = 30.0
T = TypeVar("T")


class ServedManager:
    """Serves at `path` until `stop`. `ask` runs a function in its thread, between two steps of its loop."""

    def __init__(self, directory: Path, settings: dict[str, Any], clock: Clock = monotonic) -> None:
        self.path = str(directory / "m.sock")
        self.metrics = Metrics()
        known = Settings(runtime_dir=str(directory), **settings)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen(16)
        self._server = Server(
            listener,
            lambda on_progress: SpaceTable(known, 1, self.metrics, clock, on_progress),
            Traffic(self.metrics, known, clock),
            clock,
        )
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[Server], Any]]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._server.watch_descriptor(self._wake, self._woken)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="served-manager", daemon=True)
        self._thread.start()

    def ask(self, function: Callable[[Server], T]) -> T:
        """What the function returns."""
        return self.begin(function).result(DEADLINE_S)

    def begin(self, function: Callable[[Server], T]) -> Future[T]:
        """`ask`, without waiting: the manager serves nobody while the function runs."""
        future: Future[T] = Future()
        self._commands.put((future, function))
        os.eventfd_write(self._wake, 1)
        return future

    def with_space(self, function: Callable[[Space], T]) -> T:
        """`ask`, of its only space."""
        return self.ask(lambda server: function(next(space for _, space in server.spaces)))

    def stop(self) -> None:
        """End it as an operator does. What is on disk stays."""
        if not self._stopping:
            self.begin(lambda server: setattr(self, "_stopping", True)).result(DEADLINE_S)
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()
            self._server.close(keep=True)
            os.close(self._wake)
            os.unlink(self.path)

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _serve(self) -> None:
        while not self._stopping:
            self._server.step()
            while not self._commands.empty():
                future, function = self._commands.get()
                self._server.step(0.0)  # all that clients said before
                try:
                    future.set_result(function(self._server))
                except BaseException as error:
                    future.set_exception(error)
