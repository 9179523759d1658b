"""W-TinyLFU, leaves before parents: a newcomer stays when it was asked for more often than its victim.

Einziger, Friedman, Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on Storage 13(4),
2017; the sketch is Cormode and Muthukrishnan's count-min sketch (2005).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Container, Hashable, Sequence

from kvbm.policy.leaf_first import LeafFirstQueues

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
SAMPLE_PER_SLOT = 10
COUNT_MAX = 15

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
_QUEUE_AFTER_USE = bytes((_WINDOW, _PROTECTED, _PROTECTED))

_COUNTERS_PER_SLOT = 8
_BITS_MIN, _BITS_MAX = 4, 32
_HALVES = bytes(count >> 1 for count in range(256))
_MASK_64 = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


class CountSketch:
    """Estimates how often each key was counted, for any number of keys: never too low, rarely too high.

    Four rows of at least eight counters per slot; a key has one counter in each row, and its count is the lowest.
    Memory: 32 to 64 bytes a slot. Methods take the 64-bit numbers that `number` makes of keys.
    """

    def __init__(self, slot_count: int) -> None:
        bits = max(_BITS_MIN, (_COUNTERS_PER_SLOT * slot_count - 1).bit_length())
        assert bits <= _BITS_MAX
        self._rows = tuple(bytearray(1 << bits) for _ in range(4))
        self._mask = (1 << bits) - 1
        # Four runs of bits of a number; in large sketches they overlap.
        self._shifts = tuple((64 - bits) * row // 3 for row in range(4))

    @staticmethod
    def number(key: Hashable) -> int:
        """The same 64 bits for equal keys, in every process."""
        if isinstance(key, bytes):
            return int.from_bytes(key[:8], "little")  # the manager's keys are digests
        if not isinstance(key, int):
            return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
        number = (key + 1) * _ODD & _MASK_64
        number = (number ^ number >> 32) * _ODD & _MASK_64
        return number ^ number >> 32

    def counts(self, numbers: Sequence[int]) -> list[int]:
        """The count of each."""
        mask = self._mask
        a, b, c, d = self._rows
        _, shift_b, shift_c, shift_d = self._shifts
        return [
            min(a[n & mask], b[n >> shift_b & mask], c[n >> shift_c & mask], d[n >> shift_d]) for n in numbers
        ]

    def raise_to(self, numbers: Sequence[int], counts: Sequence[int]) -> None:
        """Make the count of each at least as high as given."""
        mask = self._mask
        for row, shift in zip(self._rows, self._shifts, strict=True):
            for column, count in zip([number >> shift & mask for number in numbers], counts, strict=True):
                if row[column] < count:
                    row[column] = count

    def halve(self) -> None:
        """Halve every count, rounding down."""
        for row in self._rows:
            row[:] = row.translate(_HALVES)


class WTinyLfu(LeafFirstQueues):
    """W-TinyLFU over `slot_count` slots; see `leaf_first` for how leaves come first.

    New blocks enter a window meant for `window_share` of the slots, in order of use. A block that has to leave it meets
    the next victim of the main part, and the one asked for less often goes; a tie spares the main part. The main part
    keeps blocks that were used in it apart, in order of use, up to `protected_share` of its slots. All counts are
    halved after `sample_per_slot` × `slot_count` requests for blocks, and end at 15. The paper's window is meant for
    popular objects; conversations that grow are better served by one of half the tier.

    Other than in the paper, the counts of blocks in the tier are kept by slot, exactly, and enter the sketch when
    their block goes: a use costs no hashing, and those in the tier do not blur the others. A parent that has to leave
    the window before its continuations enters the main part unasked: it was used whenever they were.

    A use costs two comparisons where the whole chain was last used together, else a few writes. Memory: 36 bytes a
    slot, and the sketch.
    """

    def __init__(
        self,
        slot_count: int,
        window_share: float = WINDOW_SHARE,
        protected_share: float = PROTECTED_SHARE,
        sample_per_slot: int = SAMPLE_PER_SLOT,
    ) -> None:
        assert 0.0 <= window_share <= 1.0 and 0.0 <= protected_share <= 1.0 and sample_per_slot > 0
        super().__init__(slot_count, queue_count=3)
        self._window_max = max(1, int(slot_count * window_share))
        self._main_max = slot_count - self._window_max
        self._protected_max = int(self._main_max * protected_share)
        self._counts = bytearray(slot_count)
        self._numbers = array("Q", bytes(8 * slot_count))
        self._sketch = CountSketch(slot_count)
        self._sample_max = sample_per_slot * slot_count
        self._sampled = 0
        self._made_room = False

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Count a use of each block that is here, and make it the newest of where it belongs."""
        counts = self._counts
        for slot in slots:
            if slot >= 0 and counts[slot] < COUNT_MAX:
                counts[slot] += 1
        self._use(slots, _QUEUE_AFTER_USE)
        self._shrink(_PROTECTED, self._protected_max)
        self._sampled += len(slots)
        if self._sampled >= self._sample_max:
            self._sampled //= 2
            self._sketch.halve()
            counts[:] = counts.translate(_HALVES)

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Begin to fill the slots, in the window; that is the first use of these blocks."""
        if not slots:
            return
        self._fill(slots, parent)
        numbers = list(map(self._sketch.number, keys))
        for slot, number, count in zip(slots, numbers, self._sketch.counts(numbers), strict=True):
            self._numbers[slot] = number
            self._counts[slot] = count + 1 if count < COUNT_MAX else COUNT_MAX
        self._enter_all(slots, _WINDOW)
        if not self._made_room:
            # No block had to go for these: the main part fills without meetings.
            main_free = self._main_max - self._sizes[_PROBATION] - self._sizes[_PROTECTED]
            self._shrink(_WINDOW, max(self._window_max, self._sizes[_WINDOW] - main_free))
        self._made_room = False

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The losers of the window's meetings with the main part; every newcomer is worth a slot, in the window."""
        chosen: list[int] = []
        counts, sizes = self._counts, self._sizes
        self._made_room = True
        incumbent = self._incumbent(leased)
        while len(chosen) < needed:
            guest = self._guest(len(incoming), leased)
            if guest < 0:
                victim = incumbent if incumbent >= 0 else self._candidate(_WINDOW, leased)
                if victim < 0:
                    break
            elif incumbent < 0 or counts[guest] <= counts[incumbent]:
                victim = guest
            else:
                self._move(guest, _PROBATION)
                if sizes[_PROBATION] + sizes[_PROTECTED] <= self._main_max:
                    continue
                victim = incumbent
            self._empty(victim)
            chosen.append(victim)
            if victim == incumbent or incumbent < 0:
                incumbent = self._incumbent(leased)
        self._sketch.raise_to([self._numbers[slot] for slot in chosen], [counts[slot] for slot in chosen])
        return chosen

    def _incumbent(self, leased: Container[int]) -> int:
        """The block that the main part gives up next, or -1."""
        slot = self._candidate(_PROBATION, leased)
        return slot if slot >= 0 else self._candidate(_PROTECTED, leased)

    def _guest(self, arriving: int, leased: Container[int]) -> int:
        """The block that has to leave the window for as many newcomers, or -1 while they fit."""
        newer, end = self._newer, self._slot_count + _WINDOW
        while self._sizes[_WINDOW] + arriving > self._window_max and (slot := newer[end]) != end:
            if self._may_go(slot, leased):
                return slot
            if self.tree.child[slot] >= 0:
                self._move(slot, _PROBATION)
            else:
                self._wait(slot)
        return -1

    def _shrink(self, queue: int, size_max: int) -> None:
        """Move what a queue has too many of to those on probation, oldest first."""
        sizes, newer, end = self._sizes, self._newer, self._slot_count + queue
        while sizes[queue] > size_max and (slot := newer[end]) != end:
            self._move(slot, _PROBATION)
