"""Snapshots of a manager, one after the other: the session begins anew when the manager has gone and is there again."""

from __future__ import annotations

from kvbm.admin_protocol import Snapshot, SnapshotReply
from kvbm.client.admin import Admin, choose_manager
from kvbm.errors import KvbmError
from kvbm.settings import Settings


class SnapshotSource:
    """Asks the manager that the settings name, or the only one that runs. Not shared between threads."""

    def __init__(self, settings: Settings, answer_s: float) -> None:
        """An answer is waited for `answer_s` seconds."""
        self._settings = settings
        self._answer_s = answer_s
        self._admin: Admin | None = None
        self.socket_path = settings.manager or ""

    def take(self) -> SnapshotReply:
        """The manager's state now. Raises KvbmError in one line; the next call tries again from the start."""
        try:
            if self._admin is None:
                self.socket_path = choose_manager(self._settings)
                self._admin = Admin(self.socket_path, self._settings, self._answer_s)
            return self._admin.ask(Snapshot(), SnapshotReply)
        except KvbmError:
            self.close()
            raise

    def close(self) -> None:
        """End the session."""
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()
