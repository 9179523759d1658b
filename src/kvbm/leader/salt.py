"""What the leader adds to its keys beyond the namespace: which weights the ranks have, once they are not the files'."""

from __future__ import annotations

import logging
import os

from blake3 import blake3

log = logging.getLogger("kvbm.leader")

_SALT_BYTES = 16


class KeySalt:
    """Nothing while the weights are those that were loaded; a name where the trainer gives one; else a random number,
    with which blocks mean something to this engine alone."""

    def __init__(self, version: str = "") -> None:
        self.value = _of(version) if version else b""
        self._told = False
        self.named = bool(version)

    def renew(self) -> None:
        """Nobody has these keys, and nobody else will."""
        self.value = os.urandom(_SALT_BYTES)
        self.named = False
        if not self._told:
            self._told = True
            log.warning(
                "the cache was reset or the weights changed in memory: from now on blocks are kept for this engine's "
                "life only; a weights_version makes them outlive it"
            )

    def name(self, version: str) -> bool:
        """Keys of the weights that the trainer calls so; False when they have that name already."""
        value, before = _of(version), self.value
        self.value, self.named = value, True
        return value != before


def _of(version: str) -> bytes:
    return blake3(b"weights-version\0" + version.encode()).digest()[:_SALT_BYTES]
