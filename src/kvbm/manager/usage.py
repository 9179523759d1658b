"""The use of blocks by requests. The policies learn of it after the answer: that takes longer than the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvbm.block import BlockKey
from kvbm.manager.offload import Offloader
from kvbm.manager.pool import SlotPool

_PENDING_MAX = 256


class Usage:
    """Requests that the policies do not know of yet; past `_PENDING_MAX` the oldest is forgotten."""

    def __init__(self) -> None:
        # A chain and how much of it was found, or the last key of a request that ended and its output tokens.
        self._pending: deque[tuple[list[BlockKey] | BlockKey, int]] = deque(maxlen=_PENDING_MAX)

    def note(self, keys: list[BlockKey], found: int) -> None:
        """A request came for this chain; its first `found` blocks were in a tier or on the device."""
        self._pending.append((keys, found))

    def note_end(self, key: BlockKey, output_tokens: int) -> None:
        """The request whose prompt ended with this key has ended."""
        self._pending.append((key, output_tokens))

    def pass_on(
        self, pools: Iterable[SlotPool[BlockKey]], offloader: Offloader[BlockKey] | None, now_s: float
    ) -> None:
        """Pass everything on to the pools' policies, and offer the used blocks to disk again."""
        while self._pending:
            keys, count = self._pending.popleft()
            for pool in pools:
                if isinstance(keys, list):
                    pool.requested(keys, now_s)
                else:
                    pool.finished(keys, count, now_s)
            if offloader is not None and isinstance(keys, list):
                parent: BlockKey | None = None
                for key in keys[:count]:
                    offloader.used(key, parent)
                    parent = key
