"""How fast blocks come from disk: measured while reads are under way, so that a lease's arrival can be foretold."""

from __future__ import annotations

_WEIGHT = 0.2
_SAMPLE_S_MIN = 0.005


class ReadRate:
    """Blocks per second of a disk that always had reads to do: an average in which each sample counts a fifth.

    A sample is the blocks that ended within `_SAMPLE_S_MIN` or more of uninterrupted work.
    """

    def __init__(self) -> None:
        self._blocks_per_s = 0.0
        self._pending = 0
        self._since_s = 0.0
        self._ended = 0

    def submitted(self, blocks: int, now_s: float) -> None:
        """So many more blocks are being read."""
        if not self._pending:
            self._since_s, self._ended = now_s, 0  # it was idle: that time says nothing
        self._pending += blocks

    def ended(self, blocks: int, now_s: float) -> None:
        """So many blocks are read, or failed."""
        self._pending -= blocks
        self._ended += blocks
        elapsed_s = now_s - self._since_s
        if elapsed_s >= _SAMPLE_S_MIN:
            sample = self._ended / elapsed_s
            weight = _WEIGHT if self._blocks_per_s else 1.0
            self._blocks_per_s += weight * (sample - self._blocks_per_s)
            self._since_s, self._ended = now_s, 0

    def seconds_for(self, blocks: int) -> float:
        """Expected seconds until so many blocks are read, those that are queued included; 0 before anything was."""
        return blocks / self._blocks_per_s if self._blocks_per_s else 0.0
