"""Snapshots of a manager, one after the other: the session begins anew when the manager has gone and is there again."""

from __future__ import annotations

import contextlib
import time

from kvbm.client.channel import Channel
from kvbm.client.finder import find_manager
from kvbm.errors import KvbmError, ManagerUnavailable
from kvbm.protocol import PROTOCOL_VERSION, Hello, Snapshot, SnapshotReply
from kvbm.settings import Settings
from kvbm.snapshot import ManagerState


class SnapshotSource:
    """Asks the manager that the settings name, or the only one that runs. Not shared between threads."""

    def __init__(self, settings: Settings, answer_s: float) -> None:
        self._settings = settings
        self._answer_s = answer_s
        self._channel: Channel | None = None
        self.socket_path = settings.manager or ""

    def take(self) -> ManagerState:
        """The manager's state now. Raises KvbmError in one line; the next call tries again from the start."""
        try:
            if self._channel is None:
                self._channel = self._connect()
            return self._ask(self._channel)
        except KvbmError:
            self.close()
            raise

    def close(self) -> None:
        """End the session."""
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.close()

    def _connect(self) -> Channel:
        self.socket_path = find_manager(self._settings)
        channel = Channel.connect(self.socket_path, self._settings.trusted_peer_uids)
        try:
            channel.introduce(Hello(version=PROTOCOL_VERSION, role="admin"), self._answer_s)
        except BaseException:
            channel.close()
            raise
        return channel

    def _ask(self, channel: Channel) -> ManagerState:
        channel.send(Snapshot())
        deadline_s = time.monotonic() + self._answer_s
        while (left_s := deadline_s - time.monotonic()) > 0 and channel.wait(left_s):
            for message in channel.receive():
                if isinstance(message, SnapshotReply):
                    return message.state
        raise ManagerUnavailable(
            f"the manager at {self.socket_path} did not answer within {self._answer_s:g} s"
        )
