"""Each part of `gpu.py` in a process of its own, with a time limit.

A process is forked from one that has never touched the device: it has torch already, and makes a context of its own.
An illegal address, a hang or the kernel's killer of processes that take too much memory ends that process alone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from gpu_rows import Result

POLL_S = 0.02
STACK_S = 0.5
"""A process that hangs gets so long to write where it hangs."""
DEATH_S = 10.0
"""A process that was killed gets so long to die: one that waits for a broken device inside the kernel never does."""

_PR_SET_PDEATHSIG = 1


def run_in_child(
    work: Callable[[Result], None],
    lines: Path,
    limit_s: float,
    take: Callable[[dict[str, Any]], None],
    fault: str = "",
) -> str:
    """Have `work` done by a child, and `take` called with each line that it tells, as it comes.

    The lines go through the file `lines`. Returns why the child ended early, or nothing. The child and all that it
    started are gone then, as far as they can.
    """
    lines.write_text("")
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _live(work, lines, fault)
    told = _Told(lines, take)
    late = True
    try:
        deadline_s = time.monotonic() + limit_s
        while late and time.monotonic() < deadline_s:
            late = not _has_ended(child)
            told.read()
            time.sleep(POLL_S if late else 0.0)
        if late:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGUSR1)
            time.sleep(STACK_S)
    finally:
        status = _end_group(child)
    told.read()
    if late:
        return f"it took over {limit_s:g} s" + (", and does not die" if status is None else "")
    return _why(status, told)


def die_with_parent() -> None:
    """The calling process is killed when the one that forked it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _live(work: Callable[[Result], None], lines: Path, fault: str) -> NoReturn:
    """The child's whole life."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(
            resource.RLIMIT_CORE, (0, 0)
        )  # locked memory and all, it would take minutes to write
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        with lines.open("a") as file:
            result = Result(file, fault)
            try:
                work(result)
            except BaseException as error:
                traceback.print_exc()
                result.end(error)
            else:
                result.end()
                code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # What the parent would do at its end is not the child's to do, and a broken device could hang in it.
        os._exit(code)


class _Told:
    """The lines of a file that another process writes, each read once."""

    def __init__(self, lines: Path, take: Callable[[dict[str, Any]], None]) -> None:
        self._lines, self._take, self._read_bytes = lines, take, 0
        self.over = False
        self.error = ""

    def read(self) -> None:
        """Take what is there by now; a line that is not complete yet, later."""
        with self._lines.open("rb") as file:
            file.seek(self._read_bytes)
            complete = file.read().rpartition(b"\n")[0]
        if not complete:
            return
        self._read_bytes += len(complete) + 1
        for text in complete.split(b"\n"):
            line = json.loads(text)
            self.over = self.over or "over" in line
            self.error = line.get("error", self.error)
            self._take(line)


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(child: int) -> int | None:
    """Kill what is left of the child and of all that it started; how the child ended, or None if it does not."""
    # Before the child is waited for: until then nobody else can have its number.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # it may not have got as far as a group of its own
    deadline_s = time.monotonic() + DEATH_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    return None


def _why(status: int | None, told: _Told) -> str:
    """Why a child that ended by itself did not come to its end; nothing if it did."""
    if told.error:
        return told.error
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        return f"killed by {name}" + (" (out of memory, perhaps)" if -status == signal.SIGKILL else "")
    if status or not told.over:
        return f"exit status {status}"
    return ""
