"""A copier: logs every copy, and lets another copier do it. See docs/guides/extending.md."""

from __future__ import annotations

import logging
from collections import Counter

from kvbm.transfer.copier import Copier, Copying, DeviceEvent, Pairs

log = logging.getLogger(__name__)


class LoggingCopier:
    """Counts and logs the blocks that `copier` moves. The contract is `kvbm.transfer.copier.Copier`."""

    def __init__(self, copier: Copier) -> None:
        self.blocks: Counter[str] = Counter()  # "store" and "load": blocks whose copy was begun
        self._copier = copier

    def adopt_thread(self) -> None:
        self._copier.adopt_thread()

    def mark(self) -> DeviceEvent | None:
        return self._copier.mark()

    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> Copying:
        copying = self._copier.begin_store(pairs, after)
        self._note("store", pairs)
        return copying

    def begin_load(self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None) -> Copying:
        copying = self._copier.begin_load(pairs, after, layer)
        self._note("load", pairs)
        return copying

    def hold(self, copying: Copying) -> None:
        self._copier.hold(copying)

    def store(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        self.begin_store(pairs, after).wait()

    def load(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        self.begin_load(pairs, after).wait()

    def close(self) -> None:
        self._copier.close()

    def _note(self, direction: str, pairs: Pairs) -> None:
        self.blocks[direction] += len(pairs)
        log.debug("%s of %d blocks begun", direction, len(pairs))
