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
        """The device's prefix cache may hold KV that the present keys do not name: nothing on top of it is stored."""
        # The next reset of the device's cache belongs to a change of the weights that is known.
        self._reset_due = False

    def renew(self, device_emptied: bool) -> None:
        """All blocks are forgotten; those on the device too if its cache could be emptied."""
        self.salt.renew()
        self.device_mixed = not device_emptied
        self._reset_due = self._reset_due and not device_emptied

    def changed(self) -> None:
        """The ranks compute with other weights."""
        self.changes += 1
        self.device_mixed = self._reset_due = True
        self.salt.renew()

    def named(self, version: str) -> bool:
        """The trainer names the ranks' weights."""
        return self.salt.name(version)

    def device_was_reset(self, may_change: bool) -> bool:
        """The engine emptied its device's cache. If weights may change, and we saw no change and the trainer named
        none, this may be the only sign of one."""
        changed = may_change and not self._reset_due and not self.salt.named
        if changed:
            self.changed()
        self.device_mixed = self._reset_due = False
        return changed
