"""The leader's addition to its keys: it names the ranks' weights, once they are not those of the files."""

from __future__ import annotations

import logging
import os

from blake3 import blake3

log = logging.getLogger("kvbm.leader")

_SALT_BYTES = 16


class KeySalt:
    """Empty while the weights are those that were loaded; after a change a digest of the version that the trainer
    gives, or else a random number, which no other engine has."""

    def __init__(self, version: str = "") -> None:
        self.value = _of(version) if version else b""
        self._warned = False
        self.named = bool(version)

    def beside(self, extras: bytes) -> bytes:
        """What selects the key space of a request: its own extras and the weights; empty for neither."""
        # With its length first, no pair of the two can be read as another one.
        return len(extras).to_bytes(4, "little") + extras + self.value if extras or self.value else b""

    def renew(self) -> None:
        """Make keys that no engine had before and no other engine will have."""
        self.value = os.urandom(_SALT_BYTES)
        self.named = False
        if not self._warned:
            self._warned = True
            log.warning(
                "the cache was reset or the weights changed in memory: from now on blocks are kept for this engine's "
                "life only; a weights_version makes them outlive it"
            )

    def name(self, version: str) -> bool:
        """Make the keys of weights with this version; False when they are in use already."""
        value, before = _of(version), self.value
        self.value, self.named = value, True
        return value != before


def _of(version: str) -> bytes:
    return blake3(b"weights-version\0" + version.encode()).digest()[:_SALT_BYTES]
