"""How the bytes of a block are coded for their way to a store and back: as they are, or smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvbm.tiers.remote.blobs import Buffer


class Codec(Protocol):
    """A lossless code. Called by several threads at once."""

    name: str
    """What a record says of it: ASCII, at most 16 characters. Whoever knows the name can decode."""

    def encode(self, parts: Sequence[memoryview]) -> bytes | None:
        """The parts, one after the other, in fewer bytes; None where it does not get smaller."""

    def decode(self, stored: memoryview, targets: Sequence[memoryview]) -> bool:
        """Fill the targets. False where `stored` is no code of exactly so many bytes: they may be scribbled over then.

        Uses memory for as many bytes as the targets have, whatever `stored` says.
        """


class _Plain:
    """The bytes as they are."""

    name = "none"

    def encode(self, parts: Sequence[memoryview]) -> bytes | None:
        return None

    def decode(self, stored: memoryview, targets: Sequence[memoryview]) -> bool:
        if stored.nbytes != sum(target.nbytes for target in targets):
            return False
        start = 0
        for target in targets:
            _copy(target, stored[start : start + target.nbytes])
            start += target.nbytes
        return True


PLAIN: Codec = _Plain()


def codec_named(name: str) -> Codec | None:
    """The codec that a record names; None for one that is not known here."""
    return PLAIN if name == PLAIN.name else None


def _copy(target: memoryview, source: Buffer) -> None:
    # Not a slice assignment: that would hold up every other thread for as long as it takes.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
