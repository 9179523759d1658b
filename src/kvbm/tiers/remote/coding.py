"""Which codec blocks are stored with: the one that was asked for, or what pays by what was measured."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvbm.clock import Clock
from kvbm.errors import KvbmError
from kvbm.tiers.remote.codec import PLAIN, Codec, CodecChoice, StoreRates, measured, zstd_shuffled
from kvbm.tiers.remote.options import CodecWanted

log = logging.getLogger("kvbm.tiers.remote.tier")


class Coding:
    """Thread-safe. `wanted` as in `RemoteOptions`. Raises KvbmError where "zstd" is wanted and not installed."""

    def __init__(self, wanted: CodecWanted, element_bytes: int, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._codecs: dict[str, Codec] = {PLAIN.name: PLAIN}
        self._fixed: Codec | None = PLAIN if wanted == "none" else None
        if wanted != "none":
            try:
                zstd = zstd_shuffled(element_bytes)
            except KvbmError as error:
                if wanted == "zstd":
                    raise
                log.info("remote tier: blocks are stored as they are: %s", error)
            else:
                self._codecs[zstd.name] = zstd
                self._fixed = zstd if wanted == "zstd" else None
        self._choice = CodecChoice([name for name in self._codecs if name != PLAIN.name])

    @property
    def current(self) -> Codec:
        """What to store with now."""
        return self._fixed or self._codecs[self._choice.current]

    def told_store(self, write_bytes_per_s: float, read_bytes_per_s: float) -> None:
        """How fast the store is; 0 where that is not known."""
        with self._lock:
            self._choice.told_store(StoreRates(write_bytes_per_s, read_bytes_per_s))

    def look_at(self, block: Sequence[memoryview]) -> None:
        """Measure a codec with this block, if one is due."""
        if self._fixed is not None:
            return
        with self._lock:
            name = self._choice.due()
            if name is not None:
                self._choice.told_codec(name, measured(self._codecs[name], block, self._clock))
