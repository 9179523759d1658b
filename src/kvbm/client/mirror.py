"""A client's own account of what the tiers hold, for questions that must be answered from memory.

The manager tells what comes and goes (`protocol.HeldBlocks`); the account is a moment late, so what it says is only
worth asking for: a lease decides. Bounded: beyond `KEYS_MAX` blocks of a tier it knows no more, and says "not held".

Written by the thread that owns the session, read by any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm.block import Tier
from kvbm.hashing import split_keys
from kvbm.protocol import HeldBlocks

KEYS_MAX = 4_000_000


class Mirror:
    """See the module. `complete`: all that the tiers held was told once in this session."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._host: set[bytes] = set()
        self._disk: set[bytes] = set()
        self.complete = False

    def take_in(self, message: HeldBlocks) -> None:
        """The manager's account of what came and went."""
        for tier, keys in message.removed.items():
            self._of(tier).difference_update(split_keys(keys))
        for tier, keys in message.stored.items():
            held = self._of(tier)
            if len(held) < self._keys_max:
                held.update(split_keys(keys))
        self.complete = self.complete or message.complete

    def forget(self) -> None:
        """The session has ended: nothing is held, as far as anybody knows."""
        self._host, self._disk, self.complete = set(), set(), False

    def in_host(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are held in host memory in a row, from the first on."""
        return _leading(keys, (self._host,))

    def held(self, keys: Sequence[bytes]) -> int:
        """The same for host memory and disk together."""
        return _leading(keys, (self._host, self._disk))

    def each_in_host(self, keys: Iterable[bytes]) -> list[bool]:
        """Which of the keys are held in host memory."""
        return list(map(self._host.__contains__, keys))

    def each_held(self, keys: Iterable[bytes]) -> list[bool]:
        """Which of the keys are held in host memory or on disk."""
        return [key in self._host or key in self._disk for key in keys]

    def _of(self, tier: int) -> set[bytes]:
        return self._host if tier == Tier.HOST else self._disk


def _leading(keys: Sequence[bytes], tiers: tuple[set[bytes], ...]) -> int:
    for place, key in enumerate(keys):
        if not any(key in tier for tier in tiers):
            return place
    return len(keys)
