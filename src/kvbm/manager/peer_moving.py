"""The lender's side of blocks that its mover brings into a reader's memory.

A leased block is copied into memory between this manager and its mover; that copy gets the checksum, and is written to
the place that the reader named. So the mover knows nothing of host memory, and nobody who reaches it does either.

Owned by the thread of one connection. It never waits: what has not ended is asked for again.
"""

from __future__ import annotations

import logging

import msgspec

from kvbm.clock import Clock
from kvbm.manager.peer_messages import LentBlock
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.mover_wire import SPANS_MAX, Channel, Mapped, Reach, Reached, Unmapped, Write, Written
from kvbm.tiers.peers.staging import Staging, places_within
from kvbm.tiers.peers.wire import BROKEN, CHECKSUM_BYTES, WHOLE, Offer, begun_checksum

log = logging.getLogger("kvbm.manager")

STAGING_BYTES = 16 << 20
"""Memory for the blocks that are under way to one reader; a block that is larger goes over the connection."""
COPIED_AT_ONCE = 1 << 18
WRITE_BYTES = 1 << 20
"""Small blocks are written together, up to about so many bytes."""
ANSWER_S = 1.0
"""Beyond the limit of a write: a mover that has said nothing by then is given up for this reader."""


class Put:
    """One block on its way: `ended` when it has arrived, or `failed` to."""

    def __init__(self, place: int, span: tuple[int, int, int], seal: bytes) -> None:
        self.place, self.span, self.seal = place, span, seal
        self.ended = self.failed = False


class Moving:
    """What becomes of one offer. Once `spent` it is of no use any more."""

    def __init__(self, mover: Mover, offer: Offer, block_bytes: int, clock: Clock) -> None:
        self.offer = offer
        self._mover, self._block_bytes, self._clock = mover, block_bytes, clock
        self._places = places_within(STAGING_BYTES, block_bytes)
        self.spent = self._places == 0 or offer.place_bytes < block_bytes
        self._tried = 0
        self._channel: Channel | None = None
        self._staging: Staging | None = None
        self._reached = False
        self._number = 0
        self._ready_to_write: list[Put] = []
        self._under_way: dict[int, tuple[list[Put], float]] = {}

    @property
    def ready(self) -> bool:
        """Whether blocks may be put."""
        return self._reached and not self.spent

    @property
    def room(self) -> bool:
        """Whether one more block may be put now."""
        return self._staging is not None and self._staging.free > 0

    def fileno(self) -> int:
        """Readable when `turn` has something to do; -1 where there is nothing to wait for."""
        return -1 if self._channel is None else self._channel.fileno()

    def due_s(self) -> float | None:
        """When `turn` is to be called at the latest."""
        return min((end_s for _, end_s in self._under_way.values()), default=None)

    def turn(self) -> None:
        """Look at the mover."""
        if self.spent:
            return
        if self._channel is None:
            if not self._mover.running or self._mover.starts == self._tried:
                return
            self._tried = self._mover.starts
            self._begin()
        try:
            while self._channel is not None and (message := self._channel.receive()) is not None:
                if isinstance(message, Mapped):
                    self._channel.send(Reach(metadata=self.offer.metadata))
                elif isinstance(message, Reached):
                    self._reached = True
                elif isinstance(message, Unmapped):
                    self._spend(message.line)
                elif isinstance(message, Written):
                    self._written(message)
        except (OSError, msgspec.MsgspecError):
            self._lose()
        due_s = self.due_s()
        if due_s is not None and self._clock() >= due_s:
            self._spend("its process does not answer")

    def _begin(self) -> None:
        try:
            self._staging = Staging(self._block_bytes, self._places)
            self._channel = self._mover.open(self._staging, lands=False)
        except OSError as error:  # no memory, or no mover: blocks are sent over the connection
            log.debug("a reader's offer is not taken: %s", error)
            self._staging = None

    def put(self, block: LentBlock, fingerprint: bytes, place: int) -> Put:
        """Bring a block to that place of the offer; there is `room`."""
        staging = self._staging
        assert staging is not None
        own = staging.take()
        target = staging.view(own, self._block_bytes)
        checksum, first = begun_checksum(fingerprint, block.key), 0
        for view in block.views:
            for at in range(0, view.nbytes, COPIED_AT_ONCE):
                source = view[at : at + COPIED_AT_ONCE]
                piece = target[first : first + source.nbytes]
                piece[:] = source
                checksum.update(piece)
                first += source.nbytes
        seal = bytes((BROKEN,)) + bytes(CHECKSUM_BYTES)
        if block.intact():
            seal = bytes((WHOLE,)) + checksum.digest()
        there = self.offer.address + place * self.offer.place_bytes
        put = Put(own, (own * staging.place_bytes, there, first), seal)
        if seal[0] == BROKEN:
            put.ended = True  # what it would bring is of no use
            staging.give_back(own)
            return put
        self._ready_to_write.append(put)
        if len(self._ready_to_write) * self._block_bytes >= WRITE_BYTES:
            self.flush()
        return put

    def flush(self) -> None:
        """Nothing more comes soon: write what was put."""
        puts, self._ready_to_write = self._ready_to_write, []
        for first in range(0, len(puts), SPANS_MAX):
            self._write(puts[first : first + SPANS_MAX])

    def _write(self, puts: list[Put]) -> None:
        self._number += 1
        limit_s = self._mover.write_limit_s
        self._under_way[self._number] = puts, self._clock() + limit_s + ANSWER_S
        try:
            if self._channel is None:
                raise OSError("the mover has gone")
            spans = [put.span for put in puts]
            self._channel.send(Write(number=self._number, spans=spans, limit_s=limit_s))
        except OSError:
            self._lose()

    def _written(self, message: Written) -> None:
        puts, _ = self._under_way.pop(message.number, ([], 0.0))
        if message.line:
            self._fail(puts)
            self._spend(message.line)
            return
        for put in puts:
            put.ended = True
            if self._staging is not None:
                self._staging.give_back(put.place)

    def _spend(self, line: str) -> None:
        """The reader's memory cannot be reached: until it makes another offer, its blocks go over the connection."""
        if not self.spent:
            log.warning("NIXL brings no blocks to a reader, they go over TCP: %s", line)
        self.spent = True
        self._lose()

    def _lose(self) -> None:
        """The mover has gone, or is of no use: whatever was put has failed."""
        self._reached = False
        self._fail(self._ready_to_write)
        self._ready_to_write = []
        for puts, _ in self._under_way.values():
            self._fail(puts)
        self._under_way.clear()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _fail(self, puts: list[Put]) -> None:
        for put in puts:
            put.ended = put.failed = True

    def close(self) -> None:
        """The connection is over, or another offer has come: what was put has failed."""
        self.spent = True
        self._lose()
