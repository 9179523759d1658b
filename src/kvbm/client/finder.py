"""Find the manager of an engine, or start a private one.

With nothing configured, the first leader or worker of an engine starts a private manager as its child. A file lock
decides which one is first: it is taken before the start and inherited by the child, so it is held exactly as long as
that manager lives, and a dead manager's lock is free again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import msgspec

from kvbm.client.channel import Channel
from kvbm.clock import Clock
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, ManagerUntrusted, SettingsError
from kvbm.protocol import PROTOCOL_VERSION, Hello, Welcome
from kvbm.runtime_dir import check_runtime_dir, make_runtime_dir, open_lock, read_private
from kvbm.settings import Settings

log = logging.getLogger("kvbm.client.finder")

RETRY_S_MIN = 0.1
RETRY_S_MAX = 5.0
_CONNECT_POLL_S = 0.02
_HELLO_TIMEOUT_S = 30.0
_WORDS_MAX = 4096

PRIVATE_MANAGER = "kvbm.manager.process"
FROM_STDIN = "-"
"""In place of settings: there may be secrets in them, and everybody can read a command line."""
"""The module that a private manager runs; it stands in its command line, where `ps` shows it."""

RUN_MODULE = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    f"sys.path.append({os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))!r}); "
    "import runpy; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""As `python -m`, without its habit of looking in the working directory first: a `kvbm` there may be anybody's.

(Python can leave that out by itself, `-P`, from 3.11.) Ours is found last where an engine found it by other means.
"""

SOCKET_NAME = "manager.sock"
"""A shared manager listens here, in the runtime directory, unless its `--socket` names another path."""

ERROR_SUFFIX = ".error"
"""A private manager that cannot start leaves its one line in a file of this name, beside its socket."""

_last_logged: dict[str, str] = {}
"""The last warning of each address: a leader and a rank in one process would give the same one."""


class Finder(Protocol):
    """Connects to a manager, for a thread that must not wait."""

    def attempt(self) -> Channel | None:
        """A fresh connection, or None when there is none yet."""

    def welcomed(self) -> None:
        """The manager accepted the session."""


class ManagerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's manager listens, and whether we may start it."""

    socket_path: str
    private: bool

    @classmethod
    def of(cls, settings: Settings, engine: str) -> ManagerAddress:
        """The shared manager that the settings name, or the engine's private one."""
        if settings.manager:
            return cls(socket_path=settings.manager, private=False)
        name = hashlib.sha256(engine.encode()).hexdigest()[:16]
        return cls(socket_path=os.path.join(settings.runtime_dir, f"private-{name}.sock"), private=True)


class ManagerFinder:
    """Connects to the engine's manager, starting a private one when it is not there.

    `attempt` never waits longer than a connection to a local socket takes; it keeps its own back-off, which `welcomed`
    ends. Not shared between threads.
    """

    def __init__(
        self,
        address: ManagerAddress,
        settings: Settings,
        environment: Mapping[str, str],
        clock: Clock,
        namespaces: int = 1,
    ) -> None:
        """A private manager is started with these `settings` and this `environment`, for so many namespaces."""
        assert namespaces > 0
        self._namespaces = namespaces
        self.address = address
        self._settings = settings
        self._environment = dict(environment)
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._trouble = self._untrusted = ""
        self._next_try_s = -1.0
        self._backoff_s = RETRY_S_MIN

    def attempt(self) -> Channel | None:
        """A fresh connection, or None when there is none yet (or it is too early to try again)."""
        now_s = self._clock()
        if now_s < self._next_try_s:
            return None
        # Each attempt is later than the one before, also where a manager is there and refuses us every time.
        self._next_try_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * 1.5, RETRY_S_MAX)
        self._untrusted = ""
        try:
            return self._connect()
        except ManagerUnavailable:
            if self.address.private:
                self._start_quietly()
        except (ManagerUntrusted, SettingsError) as error:
            self._untrusted = str(error)
        self.log_trouble(self._untrusted)
        return None

    def welcomed(self) -> None:
        """The manager accepted the session: when it goes, the first attempt may be at once again."""
        self._backoff_s, self._next_try_s = RETRY_S_MIN, -1.0
        _last_logged.pop(self.address.socket_path, None)

    def establish(
        self,
        hello: Hello,
        timeout_s: float,
        pause: Callable[[float], object],
        answer_timeout_s: float = _HELLO_TIMEOUT_S,
    ) -> tuple[Channel, Welcome]:
        """Connect and introduce ourselves, waiting up to `timeout_s`, and for an answer up to `answer_timeout_s`.

        Raises ManagerUnavailable when there is no manager by then, ManagerRefused when it refuses us or cannot start,
        ManagerUntrusted when the socket may be another user's.
        """
        assert hello.version == PROTOCOL_VERSION
        deadline_s = self._clock() + timeout_s
        while True:
            self._next_try_s = -1.0
            channel = self.attempt()
            if channel is not None:
                try:
                    welcome = channel.introduce(hello, answer_timeout_s)
                    self.welcomed()
                    return channel, welcome
                except ManagerUnavailable:
                    channel.close()  # it was just ending, or could not start: there may be another one in a moment
                except BaseException:
                    channel.close()
                    raise
            if self._untrusted:
                raise ManagerUntrusted(self._untrusted)
            if self._trouble:
                raise ManagerRefused(self._trouble)
            if self._clock() >= deadline_s:
                raise ManagerUnavailable(
                    f"no manager answers at {self.address.socket_path} after {timeout_s:g} s"
                )
            pause(_CONNECT_POLL_S)

    def log_trouble(self, trouble: str) -> None:
        """Warn in one line why there is no cache; the same line is not repeated in a process."""
        if trouble and trouble != _last_logged.get(self.address.socket_path):
            _last_logged[self.address.socket_path] = trouble
            log.warning("no KV cache for now: %s", trouble)

    def _connect(self) -> Channel:
        """Connect, to a private manager only where no other user could have put its socket."""
        path = self.address.socket_path
        if not self.address.private:
            return Channel.connect(path, self._settings.trusted_peer_uids)
        if not check_runtime_dir(os.path.dirname(path)):
            raise ManagerUnavailable(f"no manager at {path}: there is no such directory yet")
        return Channel.connect(path)

    def _start_quietly(self) -> None:
        """`_start`, with an error kept in `_trouble`: an engine that runs goes on without a cache."""
        try:
            self._trouble = self._last_words()
            if self._trouble:
                self._child = None  # the next attempt starts another one
            else:
                self._start()
        except SettingsError as error:  # the directory: an engine can serve without it
            self._untrusted = str(error)
        except (KvbmError, OSError) as error:
            self._trouble = f"private manager could not be started: {error}"
        self.log_trouble(self._trouble)

    def _last_words(self) -> str:
        """Why the manager that we started could not serve, in its own words; empty when it left no word.

        A file that another engine's attempt left behind, perhaps days ago with other settings, is ignored.
        """
        if self._child is None:
            return ""
        try:
            return read_private(self.address.socket_path + ERROR_SUFFIX)[:_WORDS_MAX].decode().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def _start(self) -> None:
        """Start a private manager unless another process holds its lock.

        The manager detaches itself from us, so that it outlives an engine that is killed with all its children.
        """
        if self._child is not None and self._child.poll() is None:
            return
        make_runtime_dir(os.path.dirname(self.address.socket_path))
        lock_fd = open_lock(self.address.socket_path + ".lock")
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock_fd), os.stat(self.address.socket_path + ".lock")):
                return  # a manager that was ending removed the file between our open and our lock
        except (BlockingIOError, FileNotFoundError):
            return  # a manager is starting, or runs and is about to listen
        else:
            with contextlib.suppress(FileNotFoundError):  # the last start did not fail
                os.unlink(self.address.socket_path + ERROR_SUFFIX)
            command = [sys.executable, "-c", RUN_MODULE, PRIVATE_MANAGER]
            command += [self.address.socket_path, str(lock_fd), FROM_STDIN]
            if self._namespaces > 1:
                command.append(str(self._namespaces))
            with _readable(msgspec.json.encode(self._settings)) as settings:
                self._child = subprocess.Popen(
                    command,
                    pass_fds=[lock_fd],
                    stdin=settings,
                    env=self._environment,
                    start_new_session=True,
                )
        finally:
            os.close(lock_fd)


@contextlib.contextmanager
def _readable(text: bytes) -> Iterator[int]:
    """A file without a name that holds this text, from its start."""
    fd = os.memfd_create("kvbm-settings", os.MFD_CLOEXEC)
    try:
        os.write(fd, text)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
