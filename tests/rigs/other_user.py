"""What another user could do on this machine, done by a child process. Only root can become somebody else."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def run_as(uid: int, action: Callable[[], object], groups: Sequence[int] = ()) -> tuple[int, int]:
    """Start `action` in a child that is this user, in a group of its number and in `groups`.

    Its process id, and a descriptor of what it returned as text.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    said = ""
    try:
        os.close(reader)
        os.setgroups(list(groups))
        os.setgid(uid)
        os.setuid(uid)
        said = str(action())
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        os.write(writer, said.encode()[:4000])
        os._exit(0)


def result(started: tuple[int, int]) -> str:
    """What the child's action returned, once it has ended."""
    child, reader = started
    with open(reader, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


@contextmanager
def planted_socket(path: Path, uid: int = NOBODY) -> Iterator[list[bytes]]:
    """A socket at which another user listens; at the end the list holds what was said to it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    waiting, told = socket.socketpair()

    def listen() -> str:
        # The kernel notes who listens here, not who made the file.
        listener.listen(8)
        told.sendall(b".")
        told.recv(1)
        listener.setblocking(False)
        heard = b""
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return heard.hex()
            heard += connection.recv(1 << 16)

    started = run_as(uid, listen)
    heard: list[bytes] = []
    try:
        waiting.recv(1)
        yield heard
    finally:
        waiting.sendall(b".")
        heard.append(bytes.fromhex(result(started)))
        for end in (waiting, told, listener):
            end.close()
