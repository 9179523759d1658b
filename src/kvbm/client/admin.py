"""An operator's way to a running manager: which one is meant, and one question at a time with a bounded wait."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

from kvbm import protocol
from kvbm.admin_protocol import decode_from_manager
from kvbm.client.channel import Channel
from kvbm.errors import ManagerRefused, ManagerUnavailable, SettingsError
from kvbm.protocol import PROTOCOL_VERSION, Hello, Message, Refused
from kvbm.runtime_dir import check_runtime_dir
from kvbm.settings import Settings

ANSWER_S = 10.0
MANAGERS_MAX = 64
"""Sockets of one runtime directory that are looked at."""

ReplyT = TypeVar("ReplyT", bound=Message)


def running_managers(settings: Settings) -> list[str]:
    """The sockets of the managers that are meant: the one that the settings name, else all that run in the runtime
    directory. A socket that nobody listens at, as a manager that was killed leaves it, is not among them.

    Raises SettingsError for a directory that others could have put a socket into.
    """
    if settings.manager:
        return [settings.manager]
    if not check_runtime_dir(settings.runtime_dir):
        return []
    there = sorted(map(str, Path(settings.runtime_dir).glob("*.sock")))
    return [path for path in there[:MANAGERS_MAX] if _is_listening(path)]


def choose_manager(settings: Settings) -> str:
    """The socket of the manager that is meant.

    Raises ManagerUnavailable when none runs, SettingsError when it is not clear which.
    """
    running = running_managers(settings)
    if len(running) == 1:
        return running[0]
    if not running:
        raise ManagerUnavailable(
            f"no manager runs in {settings.runtime_dir}; "
            "one that was given another socket is named with --manager SOCKET"
        )
    accepted = f"the socket of one of the {len(running)} that run: {', '.join(running)}"
    raise SettingsError("--manager", settings.manager or "", accepted)


class Admin:
    """A session of role admin. Not shared between threads.

    Errors of every call: ManagerUnavailable (it is not there, or does not answer in time), ManagerRefused (it does not
    serve this, as another version does not), ManagerUntrusted; each names the socket.
    """

    def __init__(self, socket_path: str, settings: Settings, answer_s: float = ANSWER_S) -> None:
        """Connect and introduce ourselves, within `answer_s` seconds."""
        self.socket_path = socket_path
        self._answer_s = answer_s
        self._channel = _AdminChannel.connect(socket_path, settings.trusted_peer_uids)
        try:
            with self._named():
                self._channel.introduce(Hello(version=PROTOCOL_VERSION, role="admin"), answer_s)
        except BaseException:
            self._channel.close()
            raise

    def ask(self, request: Message, kind: type[ReplyT], answer_s: float = 0.0) -> ReplyT:
        """The manager's reply to the request, which may take `answer_s` seconds, if that is said."""
        answer_s = answer_s or self._answer_s
        deadline_s = time.monotonic() + answer_s
        with self._named():
            self._channel.send(request)
            while self._channel.wait(deadline_s - time.monotonic()):
                for message in cast(list[Message], self._channel.receive()):
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Refused):
                        raise ManagerRefused(message.reason)
        raise ManagerUnavailable(f"the manager at {self.socket_path} did not answer within {answer_s:g} s")

    def close(self) -> None:
        """End the session."""
        self._channel.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ManagerRefused as error:
            raise ManagerRefused(f"the manager at {self.socket_path} refused: {error}") from None
        except ManagerUnavailable as error:
            raise ManagerUnavailable(f"{self.socket_path}: {error}") from None


class _AdminChannel(Channel):
    """A channel on which replies to an operator come too."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, cast("Callable[[bytes], protocol.FromManager]", decode_from_manager))


def _is_listening(path: str) -> bool:
    """Whether somebody listens there. A connection that is closed at once costs a manager nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue is full: it is there, and slow
        except OSError:
            return False
        return True
