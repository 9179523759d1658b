"""The process that Mooncake's library lives in: `python -m kvbm.tiers.remote.drivers.mooncake_process`.

The library ends a process with a signal where a call comes after it was closed; while it looks for a master that is not
there it holds the interpreter's lock, for a minute and a half; it waits half a minute for one that is silent, and
writes into buffers whenever it likes. So a node does not load it: it starts this process, asks it over sockets, gives
up when it likes and kills it without ado.

Standard input is the control socket: first the `Setup`, then a descriptor of a connection at a time. When it ends, so
does the process, whatever the library is doing.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import socket
import sys
import threading
from typing import Any

from kvbm.strict import record_swallowed
from kvbm.tiers.remote.drivers.mooncake_wire import (
    BLOB_BYTES_MAX,
    CONNECTIONS,
    IS_THERE,
    Answer,
    Ask,
    Ended,
    Setup,
    fill,
    frame,
    receive,
    send,
)

CONNECT_S = 3.0
_INVALID = -600
"""Also the answer to a range beyond the end."""


class Buffers:
    """One thread's memory for blobs, known to Mooncake. It is returned to nobody: a thread lives as its connection."""

    def __init__(self, store: Any) -> None:
        self._store = store
        # Not more than is touched is taken.
        self._memory = mmap.mmap(-1, BLOB_BYTES_MAX, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        code = store.register_buffer(self.address, BLOB_BYTES_MAX)
        if code:
            raise OSError(f"Mooncake does not take a buffer ({code})")

    def close(self) -> None:
        """No call is under way."""
        self._store.unregister_buffer(self.address)


class Served:
    """Answers the questions of one connection."""

    def __init__(self, store: Any, config: Any, connection: socket.socket) -> None:
        self._store = store
        self._config = config
        self._connection = connection
        self._buffers = Buffers(store)

    def run(self) -> None:
        """Until the other end has closed."""
        try:
            while True:
                self._answer(receive(self._connection, Ask))
        except (EOFError, OSError):
            pass  # whoever asked has given up
        finally:
            self._connection.close()
            self._buffers.close()

    def _answer(self, ask: Ask) -> None:
        if ask.operation == "put":
            send(self._connection, Answer([self._put(ask.keys[0], ask.size)]))
        elif ask.operation == "sizes":
            send(self._connection, Answer([self._store.get_size(key) for key in ask.keys]))
        elif ask.operation == "remove":
            # By force: what was looked at has a lease of seconds. Who reads it meanwhile verifies what comes.
            send(self._connection, Answer(self._store.batch_remove(list(ask.keys), True)))
        elif ask.operation == "read":
            code = self._read(ask.keys[0], ask.start, ask.size)
            self._send_read(code, 0)
        else:
            whole = self._store.get_size(ask.keys[0])
            size = min(ask.size, whole, BLOB_BYTES_MAX)
            code = whole if whole < 0 else self._read(ask.keys[0], whole - size, size)
            self._send_read(code, whole)

    def _put(self, key: str, size: int) -> int:
        fill(self._connection, self._buffers.view[:size])
        there = self._store.is_exist(key)
        if there:
            return IS_THERE if there > 0 else int(there)
        return int(self._store.put_from(key, self._buffers.address, size, self._config))

    def _read(self, key: str, start: int, size: int) -> int:
        """How many bytes lie in the buffer now, or Mooncake's code."""
        size = min(size, BLOB_BYTES_MAX)
        code = self._range(key, start, size)
        if code == _INVALID:
            whole = self._store.get_size(key)
            if whole < 0 or whole <= start:
                return min(int(whole), 0)
            code = self._range(key, start, min(size, whole - start))
        return code

    def _range(self, key: str, start: int, size: int) -> int:
        address = self._buffers.address
        answers = self._store.get_into_ranges([address], [[key]], [[[0]]], [[[start]]], [[[size]]])
        return int(answers[0][0][0])

    def _send_read(self, code: int, whole: int) -> None:
        size = max(0, code)
        send(self._connection, Answer([code], size, max(0, whole)), [self._buffers.view[:size]])


def main() -> None:
    """Serve until the control socket ends."""
    control = socket.socket(fileno=os.dup(0))
    setup = receive(control, Setup)
    try:
        store, config = _connected(setup)
    except Exception as error:
        if not isinstance(error, OSError):  # Mooncake is not installed, does not start, or is not reached
            record_swallowed(error)
        control.sendall(frame(Ended(f"{error}")))
        os._exit(1)
    threads: list[threading.Thread] = []
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            # Not by the library's own way out, which waits for what is under way.
            os._exit(0)
        for fd in fds:
            threads = [thread for thread in threads if thread.is_alive()]
            connection = socket.socket(fileno=fd)
            if len(threads) >= 2 * CONNECTIONS:
                connection.close()  # all of them are stuck
                continue
            threads.append(threading.Thread(target=_serve, args=(store, config, connection), daemon=True))
            threads[-1].start()


def _serve(store: Any, config: Any, connection: socket.socket) -> None:
    try:
        served = Served(store, config, connection)
    except Exception as error:
        if not isinstance(error, OSError):  # the client has gone, or Mooncake takes no buffers
            record_swallowed(error)
        sys.stderr.write(f"kvbm: {error}\n")
        connection.close()
        return
    served.run()


def _connected(setup: Setup) -> tuple[Any, Any]:
    """The library's store and its options of a put. Raises with a line for people."""
    host, _, port = setup.master.rpartition(":")
    try:
        # Mooncake itself looks for a master for a minute and a half before it says that there is none.
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as there:
            own = there.getsockname()[0]
    except OSError as error:
        raise OSError(f"the master at {setup.master} cannot be reached: {error.strerror or error}") from None
    try:
        library: Any = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise OSError(f"Mooncake's library cannot be loaded: {error}") from None
    config = library.ReplicateConfig()
    config.replica_num = setup.replicas
    store = library.MooncakeDistributedStore()
    code = store.setup(
        setup.host or own,
        setup.metadata,
        setup.segment_bytes,
        0,
        setup.protocol,
        setup.device,
        setup.master,
    )
    if code:
        raise OSError(
            f"Mooncake does not start with master {setup.master}, metadata {setup.metadata}, "
            f"protocol {setup.protocol}, device {setup.device or 'none'} ({code})"
        )
    return store, config


if __name__ == "__main__":
    main()
