"""What the leader knows of the ranks' weights: what names them in keys, and whether the device holds KV of others."""

from __future__ import annotations

from kvbm.leader.salt import KeySalt


class WeightsKnown:
    """Renews the keys (`salt`) when weights change. Its answers say whether the keys have changed."""

    def __init__(self, version: str) -> None:
        self.salt = KeySalt(version)
        self.changes = 0
        """How many changes of the weights the leader knows of."""
        self.device_mixed = False
        """The device's prefix cache may hold KV of earlier weights."""

    def renew(self) -> None:
        """All blocks are forgotten, and the device's cache is emptied."""
        self.salt.renew()
        self.device_mixed = False

    def changed(self) -> None:
        """The ranks compute with other weights."""
        self.changes += 1
        self.device_mixed = True
        self.salt.renew()

    def named(self, version: str) -> bool:
        """The trainer names the ranks' weights."""
        return self.salt.name(version)

    def device_was_reset(self, may_change: bool) -> bool:
        """The engine emptied its device's cache. If weights may change, and we saw no change and the trainer named
        none, this may be the only sign of one."""
        changed = may_change and not self.device_mixed and not self.salt.named
        if changed:
            self.changed()
        self.device_mixed = False
        return changed
