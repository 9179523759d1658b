"""What engines said of the blocks in a tier's slots, so that what the tier holds can be announced to routers.

A router hashes tokens itself, so an event without the block's tokens means nothing to it. Engines that publish events
send them along with the blocks they store. Only then anything is kept here: a fixed number of bytes a slot, apart from
the index. In host memory that is all of it (four bytes a token and two hashes); of blocks on disk only the hash, and
the tier keeps the rest beside their bytes. A block that no engine has spoken of is held and found as any other, and
not announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvbm.block import KEY_BYTES, BlockKey, Tier
from kvbm.framing import FACTS_BYTES_MAX, TOKEN_BYTES
from kvbm.manager.pool import SlotPool
from kvbm.protocol import HELD

if TYPE_CHECKING:
    import numpy as np

_UNKNOWN, _FILLING, _HELD = range(3)
_NO_HASH = bytes(KEY_BYTES)


class SlotFact(NamedTuple):
    """What is said of a block: the engine's own hash of it and of the one before it (empty: none), and the rest as in
    `protocol.Reserve`."""

    engine_hash: bytes
    before: bytes
    tokens: bytes
    facts: bytes = b""

    def text(self) -> bytes:
        """All but the hash, as a tier keeps it."""
        return (self.before or _NO_HASH) + self.tokens + self.facts

    @staticmethod
    def of_text(engine_hash: bytes, text: bytes, token_bytes: int) -> SlotFact | None:
        """The same again; None where it is no such text."""
        end = KEY_BYTES + token_bytes
        if len(text) < end or len(engine_hash) != KEY_BYTES:
            return None
        before = text[:KEY_BYTES]
        return SlotFact(engine_hash, b"" if before == _NO_HASH else before, text[KEY_BYTES:end], text[end:])


class SlotFacts:
    """The facts of one tier's slots, and those who listen to them. Owned by the manager's thread.

    Where the tier keeps the `SlotFact.text` of its blocks, `read(slots)` begins to read them, and `texts_read` follows;
    False: it cannot, as the tier is off. Without it all is kept here.
    """

    def __init__(
        self,
        tier: Tier,
        slot_count: int,
        block_tokens: int,
        read: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self.tier = tier
        self.slot_count = slot_count
        self.token_bytes = block_tokens * TOKEN_BYTES
        self._read = read
        self._entry_bytes = KEY_BYTES if read is not None else 2 * KEY_BYTES + self.token_bytes
        self._table = bytearray()
        self._state = bytearray()
        self._more: dict[int, bytes] = {}
        # What the tier has read last, by slot; and whether it reads now.
        self._texts: dict[int, bytes] = {}
        self.is_reading = False
        self._listeners: list[TierListener] = []

    def note(self, slot: int, fact: SlotFact) -> None:
        """The slot is being filled with this block, or holds it."""
        if len(fact.tokens) == self.token_bytes and len(fact.facts) <= FACTS_BYTES_MAX:
            kept = b"" if self._read is not None else fact.text()[: KEY_BYTES + self.token_bytes]
            self._note(slot, fact.engine_hash + kept)
            if fact.facts and self._read is None:
                self._more[slot] = fact.facts

    def brought(self, slot: int, engine_hash: bytes, text: bytes) -> None:
        """The slot is being filled with this block, of which another tier kept that text."""
        fact = SlotFact.of_text(engine_hash, text, self.token_bytes)
        if fact is not None:
            self.note(slot, fact)

    def found(self, slots: np.ndarray, engine_hashes: np.ndarray) -> None:
        """The slots hold these blocks since before a restart; the tier may know what was said of them. A row of
        `KEY_BYTES` for each hash."""
        import numpy as np  # takes long to load

        assert self._read is not None and engine_hashes.shape == (len(slots), self._entry_bytes)
        self._make_table()
        np.frombuffer(self._table, np.uint8).reshape(self.slot_count, -1)[slots] = engine_hashes
        np.frombuffer(self._state, np.uint8)[slots] = _HELD
        for listener in self._listeners:
            for slot in slots.tolist():
                listener.committed(slot)

    def known(self, slot: int) -> bool:
        """Whether anything is said of the block in a slot."""
        return bool(self._state) and self._state[slot] != _UNKNOWN

    def readable(self, slots: Sequence[int]) -> Sequence[int]:
        """Those of these slots of which `of` can be asked. Where there is none, the tier begins to read."""
        if self._read is None or not slots:
            return slots
        ready = [slot for slot in slots if slot in self._texts]
        if not ready and not self.is_reading:
            self.is_reading = self._read(slots)
            return [] if self.is_reading else slots
        return ready

    def texts_read(self, texts: dict[int, bytes]) -> None:
        """What the tier has read, by slot; empty where it knows nothing."""
        self._texts, self.is_reading = texts, False

    def of(self, slot: int) -> SlotFact | None:
        """What is said of the block in a slot; None where nothing is. Where the tier keeps that, it has been read
        (`readable`)."""
        if not self.known(slot):
            return None
        start = slot * self._entry_bytes
        entry = bytes(self._table[start : start + self._entry_bytes])
        text = entry[KEY_BYTES:] if self._read is None else self._texts.get(slot, b"")
        return SlotFact.of_text(entry[:KEY_BYTES], text + self._more.get(slot, b""), self.token_bytes)

    def engine_hash(self, slot: int) -> bytes:
        """The engine's hash of the block in a slot of which something is said."""
        start = slot * self._entry_bytes
        return bytes(self._table[start : start + KEY_BYTES])

    def committed(self, slots: Sequence[int]) -> None:
        """The blocks in these slots can be found from now on."""
        if not self._state:
            return
        state = self._state
        for slot in slots:
            if state[slot]:
                state[slot] = _HELD
                for listener in self._listeners:
                    listener.committed(slot)

    def emptied(self, slots: Sequence[int]) -> None:
        """The slots no longer hold their blocks."""
        if not self._state:
            return
        for slot in slots:
            if self._state[slot]:
                for listener in self._listeners:
                    listener.emptied(slot)
                self._state[slot] = _UNKNOWN
                self._more.pop(slot, None)
                self._texts.pop(slot, None)

    def held_from(self, start: int, end: int) -> list[int]:
        """The slots from `start` up to `end` that hold a block of which something is said."""
        return [slot for slot in range(start, min(end, len(self._state))) if self._state[slot] == _HELD]

    def listen(self) -> TierListener:
        """A new listener, which is told of what is held as well."""
        listener = TierListener(self)
        self._listeners.append(listener)
        return listener

    def ignore(self, listener: TierListener) -> None:
        """It listens no more."""
        self._listeners.remove(listener)

    def _note(self, slot: int, entry: bytes) -> None:
        self._make_table()
        start = slot * self._entry_bytes
        self._table[start : start + self._entry_bytes] = entry
        self._state[slot] = max(self._state[slot], _FILLING)

    def _make_table(self) -> None:
        if not self._state:
            self._state = bytearray(self.slot_count)
            self._table = bytearray(self.slot_count * self._entry_bytes)


class TierListener:
    """What one listener has yet to be told of a tier. Bounded by the tier: a block that comes and goes untold leaves
    nothing, and nothing is told of a block twice, unless all is told `again`."""

    def __init__(self, facts: SlotFacts) -> None:
        self.facts = facts
        self._told = bytearray(facts.slot_count)
        self._stored: dict[int, None] = {}
        self._removed: deque[bytes] = deque()
        self._looked_at = 0
        self._repeats = False

    def committed(self, slot: int) -> None:
        """A block came into this slot."""
        if not self._told[slot]:
            self._stored[slot] = None

    def emptied(self, slot: int) -> None:
        """The block in this slot is about to be forgotten."""
        self._stored.pop(slot, None)
        if self._told[slot]:
            self._told[slot] = 0
            self._removed.append(self.facts.engine_hash(slot))

    @property
    def complete(self) -> bool:
        """All that the tier holds has been told."""
        return not self._stored and not self._removed and self._looked_at >= self.facts.slot_count

    @property
    def idle(self) -> bool:
        """There is nothing to tell now: all has been told, or what is left is being read."""
        waits = self.facts.is_reading and not self._removed and self._looked_at >= self.facts.slot_count
        return waits or self.complete

    def again(self) -> None:
        """Tell of all that the tier holds once more. What goes meanwhile is told of as ever."""
        self._looked_at, self._repeats = 0, True

    def take_removed(self, blocks_max: int) -> list[bytes]:
        """The hashes of blocks that it was told of and that have gone, at most so many."""
        return [self._removed.popleft() for _ in range(min(blocks_max, len(self._removed)))]

    def take_stored(self, blocks_max: int) -> list[SlotFact]:
        """Blocks to tell of, at most so many; they count as told. None while removals wait: one of them may be of a
        block that has come back since."""
        if self._removed:
            return []
        end = min(self._looked_at + blocks_max, self.facts.slot_count)
        for slot in self.facts.held_from(self._looked_at, end):
            if self._repeats or not self._told[slot]:
                self._stored[slot] = None
        self._looked_at = end
        slots = [slot for slot, _ in zip(self._stored, range(blocks_max), strict=False)]
        told = list[SlotFact]()
        for slot in self.facts.readable(slots):
            del self._stored[slot]
            fact = self.facts.of(slot)
            if fact is not None:  # nobody spoke of it before the restart, or the tier lost it
                self._told[slot] = 1
                told.append(fact)
        return told


def note_facts(
    facts: SlotFacts,
    pool: SlotPool[BlockKey],
    keys: Sequence[BlockKey],
    answer: Sequence[int],
    said: Sequence[SlotFact],
) -> None:
    """What an engine says of the blocks that it stores, with the answer that its reservation got. Of a block that was
    held already and that no engine spoke of, this makes it known."""
    for key, given, fact in zip(keys, answer, said, strict=True):
        slot = pool.find(key) if given == HELD else given
        if slot is not None and slot >= 0 and not facts.known(slot):
            facts.note(slot, fact)
            if given == HELD:
                facts.committed((slot,))
