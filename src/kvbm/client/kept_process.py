"""A child process that is kept running: started again when it ends, a few times or for ever, and ended with its parent.

A thread waits for the child and touches nothing of its owner's. The child reads its input, which ends with the parent
however that dies, and must end then.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvbm.client.finder import RUN_MODULE
from kvbm.clock import Clock

STARTS_MAX, STARTS_S = 4, 600.0
"""So many ends of the child within so many seconds, and it is not started again."""
ENDS_MAX = 16
PAUSE_S_MAX = 60.0
"""Between two starts of a child that is started again for ever; the pause doubles with every end that is remembered."""
END_S = 5.0
"""A child that has not ended by then is killed."""


class KeptProcess:
    """`title` names it in the log. `words(first)` are the module to run and its arguments, where `first` tells the
    first start from the later ones. `given_up(why)` is called from the thread when it is not started again; with
    `for_ever` that is only where there is no process to be had.
    """

    def __init__(
        self,
        title: str,
        words: Callable[[bool], Sequence[str]],
        given_up: Callable[[str], None],
        clock: Clock,
        log: logging.Logger,
        pass_fds: Sequence[int] = (),
        for_ever: bool = False,
    ) -> None:
        self._title = title
        self._words = words
        self._given_up = given_up
        self._clock = clock
        self._log = log
        self._pass_fds = tuple(pass_fds)
        self._for_ever = for_ever
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread(target=self._watch, name=f"kvbm {title}", daemon=True)

    def start(self) -> None:
        """The first child. Raises OSError where no process is to be had."""
        self._spawn(first=True)
        self._watcher.start()

    def end(self) -> None:
        """The child ends with its input, or is killed. Nothing is started any more."""
        with self._lock:
            self._ending.set()
            child = self._child
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if self._watcher.is_alive():
            self._watcher.join(END_S)

    def _spawn(self, first: bool) -> subprocess.Popen[bytes] | None:
        """A new child; None at the end."""
        with self._lock:
            if self._ending.is_set():
                return None
            self._child = subprocess.Popen(
                [sys.executable, "-c", RUN_MODULE, *self._words(first)],
                pass_fds=self._pass_fds,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            return self._child

    def _watch(self) -> None:
        ends_s: deque[float] = deque(maxlen=ENDS_MAX if self._for_ever else STARTS_MAX)
        child = self._child
        while child is not None:
            how = _ended(child.wait())
            ends_s.append(self._clock())
            assert child.stdin is not None
            child.stdin.close()
            if self._ending.is_set():
                return
            if self._for_ever:
                recent = sum(ends_s[-1] - each < STARTS_S for each in ends_s)
                if self._ending.wait(min(2.0 ** (recent - 2), PAUSE_S_MAX)):
                    return
            elif len(ends_s) == STARTS_MAX and ends_s[-1] - ends_s[0] < STARTS_S:
                self._given_up(
                    f"it ended {STARTS_MAX} times within {STARTS_S / 60:g} min, the last time {how}"
                )
                return
            self._log.warning("the process of %s ended, %s; it is started again", self._title, how)
            try:
                child = self._spawn(first=False)
            except OSError as error:
                self._given_up(f"its process ended {how}, and there is no other to be had: {error.strerror}")
                return


def _ended(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"with status {status}"
