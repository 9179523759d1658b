"""The table of slot generations: one u64 a slot, which rises whenever the slot stops holding its block.

Needs numpy, which takes too long to load to be imported before there is an arena.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

BYTES = 8
_FEW = 12
"""Up to so many slots a loop is faster than a call of numpy."""


class Generations:
    """The generations of `slot_count` slots, in a mapping that ranks read at the same time."""

    def __init__(self, mapping: mmap.mmap, first: int) -> None:
        """`first` is where every slot begins."""
        self._one_by_one = memoryview(mapping).cast("Q")
        self._at_once = np.frombuffer(self._one_by_one, np.uint64)
        self._at_once[:] = first

    def of(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The generation of each slot."""
        if len(slots) <= _FEW:
            return tuple(self._one_by_one[slot] for slot in slots)
        return tuple(self._at_once[np.fromiter(slots, np.intp, len(slots))].tolist())

    def rise(self, slots: Sequence[int]) -> None:
        """These slots, each named once, stop holding their blocks."""
        if len(slots) <= _FEW:
            for slot in slots:
                self._one_by_one[slot] += 1
        else:
            self._at_once[np.fromiter(slots, np.intp, len(slots))] += np.uint64(1)

    def close(self) -> None:
        """Let go of the mapping."""
        del self._at_once
        self._one_by_one.release()
