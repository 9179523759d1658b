"""Demotion: the blocks that only one session asked for give their host slots back, where they lie on disk too.

From the end of the chain on, because a block without those before it is of no use. A block that is leased, or whose
write has not ended, is waited for, for a while; one that the disk does not take stays until the eviction policy chooses
it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.clock import Clock
from kvbm.hashing import split_keys
from kvbm.manager.disk_side import DiskSide
from kvbm.manager.pool import SlotPool
from kvbm.manager.sessions import KnownSession

DEMOTED = "demoted"
"""Why these blocks leave host memory, as a reason of evictions."""
BLOCKS_AT_ONCE = 64
EVERY_S = 0.5
WAITED_S_MAX = 60.0
CHAINS_MAX = 64
"""Chains that wait to go; the oldest is left to the policy."""


@dataclass(slots=True)
class _Chain:
    """Blocks that are to go, the last one first; `keys` are joined."""

    session: KnownSession
    keys: bytearray
    until_s: float
    look_s: float


class LettingGo:
    """The demotions of one space. Owned by the manager's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._chains: deque[_Chain] = deque(maxlen=CHAINS_MAX)

    def begin(self, session: KnownSession, keys: bytes) -> None:
        """These blocks of a session, consecutive ones of a chain whose keys are joined, may go."""
        if keys:
            now_s = self._clock()
            self._chains.append(_Chain(session, bytearray(keys), now_s + WAITED_S_MAX, now_s))

    def cancel(self, session: KnownSession) -> None:
        """The session has come back: what has not gone stays."""
        if self._chains:
            kept = [each for each in self._chains if each.session is not session]
            self._chains = deque(kept, maxlen=CHAINS_MAX)

    def advance(self, host: SlotPool[BlockKey], disk: DiskSide | None) -> bool:
        """Let some of them go. Whether it is to be called again at once."""
        below = disk.pool_if_on if disk is not None else None
        now_s = self._clock()
        if not self._chains or self._chains[0].look_s > now_s:
            return False
        chain = self._chains.popleft()
        if below is None or chain.until_s <= now_s:
            return bool(self._chains)
        waits = _drop_some(chain.keys, host, below)
        if waits:
            chain.look_s = now_s + EVERY_S
            self._chains.append(chain)
        elif chain.keys:
            self._chains.appendleft(chain)
        return True


def _drop_some(keys: bytearray, host: SlotPool[BlockKey], below: SlotPool[BlockKey]) -> bool:
    """Drop some of the last blocks. Whether the last one that is left has to be waited for."""
    for key in reversed(split_keys(bytes(keys[-BLOCKS_AT_ONCE * KEY_BYTES :]))):
        slot = host.find(key)
        if slot is None:
            if host.holds(key):
                return True
        elif host.is_leased(slot) or below.find(key) is None:
            return True
        else:
            host.evict(slot, DEMOTED)
        del keys[-KEY_BYTES:]
    return False
