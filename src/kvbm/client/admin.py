"""An operator's way to a running manager: which one is meant, and one question at a time with a bounded wait."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

from kvbm import protocol
from kvbm.admin_protocol import Describe, Description, decode_from_manager
from kvbm.client.channel import Channel
from kvbm.client.whereabouts import listening_sockets
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, ManagerUnclear
from kvbm.protocol import PROTOCOL_VERSION, FromManager, Hello, Message, Refused
from kvbm.settings import Settings

ANSWER_S = 10.0
LISTED_MAX = 8
"""Managers that are asked who they are, where it is not clear which is meant."""
LIST_ANSWER_S = 1.0
"""Each of these has this long to answer."""

ReplyT = TypeVar("ReplyT", bound=Message)


def running_managers(settings: Settings) -> list[str]:
    """The sockets of the managers that are meant: the one that the settings name, else all that this user runs.

    Raises SettingsError for a runtime directory that others could have put a socket into.
    """
    return [settings.manager] if settings.manager else listening_sockets(settings.runtime_dir)


def choose_manager(settings: Settings) -> str:
    """The socket of the manager that is meant.

    Raises ManagerUnavailable when none runs, ManagerUnclear, which lists them, when it is not clear which.
    """
    running = running_managers(settings)
    if len(running) == 1:
        return running[0]
    if not running:
        raise ManagerUnavailable(
            f"no manager runs in {settings.runtime_dir}; "
            "one that was given another socket is named with --manager SOCKET"
        )
    listed = "; ".join(f"{path} ({_whose(path, settings)})" for path in running[:LISTED_MAX])
    more = f"; {len(running) - LISTED_MAX} more" if len(running) > LISTED_MAX else ""
    raise ManagerUnclear(f"{len(running)} managers run, choose one with --manager SOCKET: {listed}{more}")


def _whose(path: str, settings: Settings) -> str:
    """The models and the engines of a manager, in a few words."""
    try:
        with Admin(path, settings, LIST_ANSWER_S) as admin:
            described = admin.ask(Describe(), Description)
    except KvbmError:
        return "does not answer"
    models = dict.fromkeys(space.model for space in described.spaces)
    if not models:
        return "no engine has connected yet"
    engines = ", ".join(engine.engine for engine in described.engines) or "none connected"
    return f"model {', '.join(models)}, engines {engines}"


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
        self.tell(request)
        with self._named():
            while self._channel.wait(deadline_s - time.monotonic()):
                for message in cast(list[Message], self._channel.receive()):
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Refused):
                        raise ManagerRefused(message.reason)
        raise ManagerUnavailable(f"the manager at {self.socket_path} did not answer within {answer_s:g} s")

    def tell(self, request: Message) -> None:
        """Send a request that has no reply of its own."""
        with self._named():
            self._channel.send(request)

    def hear(self, wait_s: float) -> list[FromManager]:
        """What the manager has sent since, waiting up to `wait_s` seconds for the first of it; empty when nothing."""
        with self._named():
            self._channel.wait(wait_s)
            return self._channel.receive()

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
