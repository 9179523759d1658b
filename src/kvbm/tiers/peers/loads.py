"""A load under way at a peer: which blocks still lack their answer, and the one that is arriving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbm.block import BlockKey, Outcome
from kvbm.errors import ProtocolError
from kvbm.tiers.contract import BlockEnd, Completion
from kvbm.tiers.peers.wire import CHECKSUM_BYTES, SEAL_BYTES, WHOLE, Lent, Stream, begun_checksum
from kvbm.tiers.remote.contract import Buffers

COPIED_AT_ONCE = 1 << 18
"""Bytes that are still in the CPU's cache when their checksum is computed."""
_RETRIED = BlockEnd(Outcome.RETRY)


@dataclass(slots=True, eq=False)
class Load:
    """One accepted submission. `deadline_s` is when it completes at the latest."""

    job_id: int
    keys: Sequence[BlockKey]
    targets: Sequence[Buffers]
    began_s: float
    deadline_s: float
    asked_s: float = 0.0
    answered_s: float = 0.0
    """When its first answer came; 0 before that."""
    ends: list[BlockEnd | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends = [None] * len(self.keys)

    @property
    def ended(self) -> bool:
        return None not in self.ends

    def completion(self, now_s: float, block_bytes: int, error: str = "") -> Completion:
        """Its end, as far as it came: what has no answer is to be tried again."""
        ends = [end or _RETRIED for end in self.ends]
        return Completion.of(self.job_id, ends, block_bytes, now_s - self.began_s, error)


class Arrival:
    """The bytes of one block, straight into its targets, then its seal. The checksum grows as they come."""

    moved = False

    def __init__(self, load: Load, head: Lent, fingerprint: bytes) -> None:
        """Raises ProtocolError where what is to come is not what was asked for: nothing is written then."""
        targets = load.targets[head.index]
        size = sum(target.nbytes for target in targets)
        if head.size != size:
            raise ProtocolError(f"a block of {head.size} bytes: asked for are {size}")
        self.load, self.head = load, head
        self._targets = targets
        self._checksum = begun_checksum(fingerprint, load.keys[head.index])
        self._seal = memoryview(bytearray(SEAL_BYTES))
        self._left = self._to_receive()
        self._place = 0

    def _to_receive(self) -> list[memoryview]:
        return [*self._targets, self._seal]

    def receive(self, stream: Stream) -> int:
        """Take what has arrived, in one go; 0 when nothing has. Raises OSError."""
        target = self._left[self._place]
        count = stream.receive(target)
        if count:
            if self._place < len(self._left) - 1:
                self._checksum.update(target[:count])
            self._left[self._place] = target[count:]
            if count == target.nbytes:
                self._place += 1
        return count

    @property
    def complete(self) -> bool:
        return self._place == len(self._left)

    def end(self) -> BlockEnd:
        """How the block ended, now that all of it is here."""
        verdict, checksum = self._seal[0], bytes(self._seal[-CHECKSUM_BYTES:])
        if verdict != WHOLE:
            return BlockEnd(Outcome.MISS)
        self._fetch()
        if checksum != self._checksum.digest():
            return BlockEnd(Outcome.MISS, corrupt=True)
        head = self.head
        return BlockEnd(Outcome.HIT, False, head.engine_hash, head.group, head.facts)

    def _fetch(self) -> None:
        """Bring the bytes that did not come over the connection."""


class MovedArrival(Arrival):
    """A block whose bytes a mover has put into `source`: only its seal comes. The checksum is that of the targets, so
    what still changes in the source is wrong bytes like any other."""

    moved = True

    def __init__(self, load: Load, head: Lent, fingerprint: bytes, source: memoryview) -> None:
        super().__init__(load, head, fingerprint)
        self._source = source

    def _to_receive(self) -> list[memoryview]:
        return [self._seal]

    def _fetch(self) -> None:
        first = 0
        for target in self._targets:
            for at in range(0, target.nbytes, COPIED_AT_ONCE):
                piece = target[at : at + COPIED_AT_ONCE]
                piece[:] = self._source[first : first + piece.nbytes]
                self._checksum.update(piece)
                first += piece.nbytes
