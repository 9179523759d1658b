"""What requests asked for, told to the policies after the answer went out: it takes longer than the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvbm.block import BlockKey
from kvbm.manager.offload import Offloader
from kvbm.manager.pool import SlotPool

_WAITING_MAX = 256


class Usage:
    """Requests whose use the policies have not heard of yet; past `_WAITING_MAX` the oldest is forgotten."""

    def __init__(self) -> None:
        # A chain and how much of it was found, or the last key of a request that ended and its output tokens.
        self._waiting: deque[tuple[list[BlockKey] | BlockKey, int]] = deque(maxlen=_WAITING_MAX)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def note(self, keys: list[BlockKey], found: int) -> None:
        """A request came for this chain; its first `found` blocks were in a tier or on the device."""
        self._waiting.append((keys, found))

    def note_end(self, key: BlockKey, output_tokens: int) -> None:
        """The request whose chain ended with this key is through."""
        self._waiting.append((key, output_tokens))

    def tell(
        self, pools: Iterable[SlotPool[BlockKey]], offloader: Offloader[BlockKey] | None, now_s: float
    ) -> None:
        """Tell the tiers' policies, and offer what was used to the tier below again."""
        while self._waiting:
            keys, count = self._waiting.popleft()
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
