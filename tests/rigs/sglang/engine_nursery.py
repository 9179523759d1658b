"""A process that has imported SGLang once, and forks one process per engine. Run by `engine_process.Nursery`.

    python engine_nursery.py SOCKET_FD

Imports take longer than all that a test does. An engine begins as a process that has imported everything and started
nothing: no thread, no pool, no socket. Its scheduler is a fork too, where SGLang would start Python anew (`spawn`).

A message on the socket is the JSON of an engine's environment, with three file descriptors: its lines of JSON in, those
out, and its log. The answer is its process id.
"""

from __future__ import annotations

import array
import json
import multiprocessing
import os
import signal
import socket
import sys
from typing import Any

DESCRIPTORS = 3
MESSAGE_BYTES = 1 << 20


def prepare() -> None:
    """Import what an engine's processes import."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *arguments, **keywords: None  # type: ignore[method-assign]
    import engine_child  # noqa: F401
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def receive(connection: socket.socket) -> tuple[dict[str, str], list[int]] | None:
    """The next engine's environment and file descriptors, or None at the end."""
    size = array.array("i").itemsize * DESCRIPTORS
    message, ancillary, _, _ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(size))
    if not message:
        return None
    numbers = array.array("i")
    for _, _, data in ancillary:
        numbers.frombytes(data)
    variables: dict[str, str] = json.loads(message)
    return variables, list(numbers)


def become_engine(variables: dict[str, str], numbers: list[int]) -> None:
    """Serve one engine in this process, which is a fork, and end it."""
    import engine_child

    reader, writer, log = numbers
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(variables)
    with os.fdopen(reader) as lines, os.fdopen(writer, "w") as answers:
        engine_child.answer(lines, answers)
    sys.stdout.flush()


def serve(connection: socket.socket) -> None:
    """Fork an engine for each message until the other end goes."""
    # Children that end are nobody's concern: a test sees the end of their lines.
    while (wanted := receive(connection)) is not None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                connection.close()
                become_engine(*wanted)
                status = 0
            finally:
                os._exit(status)
        for number in wanted[1]:
            os.close(number)
        connection.sendall(json.dumps(child).encode())
        _reap()


def _reap() -> Any:
    """Take leave of children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    """Serve the socket that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        prepare()
        connection.sendall(b"ready")
        serve(connection)


if __name__ == "__main__":
    main()
