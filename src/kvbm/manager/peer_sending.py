"""What goes out to one reader: frames, and the blocks of leased parts, over the connection or by the mover.

Owned by the connection's thread. It never waits: what cannot go on is gone on with at the next `send`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from kvbm.clock import Clock
from kvbm.manager.peer_messages import LentBlock, Part
from kvbm.manager.peer_moving import Moving, Put
from kvbm.tiers.peers.wire import (
    BROKEN,
    CHECKSUM_BYTES,
    NO_PLACE,
    WHOLE,
    Lent,
    Stream,
    begun_checksum,
    framed,
)

SENT_AT_ONCE = 1 << 18
"""Bytes that go to the socket in one call: they are still in the CPU's cache when their checksum is computed."""

SOCKET, MOVER = True, False
"""What the sending waits for."""


class Digest(Protocol):
    """A checksum that grows."""

    def update(self, data: memoryview) -> None:
        """These bytes come next."""


class AskPlaces(NamedTuple):
    """Where in the memory of an offer the blocks of an ask may be put: for each a place, or NO_PLACE."""

    offer: int = 0
    places: tuple[int, ...] = ()


class _Answer(NamedTuple):
    """The next answer to go out: block `at` of a part, with its way by the mover if it takes that. The part's end
    where `at` is beyond it."""

    part: Part
    at: int
    put: Put | None = None


class Sending:
    """`asks` are the open asks, `count(name, number)` counts, `sent(part)` is told of each part that is over."""

    def __init__(
        self,
        asks: dict[int, AskPlaces],
        clock: Clock,
        count: Callable[..., None],
        sent: Callable[[Part], None],
    ) -> None:
        self.fingerprint = b""
        self.said_s = clock()
        self.told_s: float | None = None
        """When news was sent that nobody has seen yet."""
        self.moving: Moving | None = None
        self._asks, self._clock, self._count, self._sent = asks, clock, count, sent
        self._frames: deque[bytes] = deque()
        self._news_out = False
        self._parts: deque[Part] = deque()
        self._answers: deque[_Answer] = deque()
        self._going: Iterator[bool] | None = None
        self._half_out = self._ending = False
        """The first answer has begun to go out; no other one begins any more."""

    # ---- what is to go out

    def say(self, frame: bytes, news: bool = False) -> None:
        """Send this; `news`: and say in `told_s` when."""
        self._frames.append(frame)
        self._news_out = self._news_out or news

    def lend(self, part: Part) -> None:
        """Answer these blocks."""
        self._parts.append(part)

    def only_frames(self) -> None:
        """No block begins any more. One that is half out goes on, under its lease's deadline."""
        self._ending = True
        self._parts.clear()
        half = self._answers[0] if self._half_out else None
        self._answers.clear()
        if half is not None:
            self._answers.append(half)

    @property
    def quiet(self) -> bool:
        """Nothing is on its way out."""
        return self._going is None and not self._frames

    def deadline_s(self) -> float | None:
        """When the first lease ends whose blocks are on their way."""
        leased = (answer.part.deadline_s for answer in self._answers if answer.part.lease)
        return min(leased, default=None)

    # ---- sending

    def send(self, stream: Stream) -> bool:
        """Send what there is. Whether bytes are left that the socket does not take now."""
        while True:
            if self._going is None:
                self._going = self._next(stream)
                if self._going is None:
                    return False
            waits_for = next(self._going, None)
            if waits_for is not None:
                return waits_for is SOCKET
            self._going = None

    def _next(self, stream: Stream) -> Iterator[bool] | None:
        if self._frames:
            frames = b"".join(self._frames)
            self._frames.clear()
            told, self._news_out = self._news_out, False
            return self._send_frames(stream, frames, told)
        if self._parts:
            return self._send_part(stream, self._parts.popleft())
        if self._answers:
            return self._send_answer(stream)
        return None

    def _send_frames(self, stream: Stream, frames: bytes, told: bool) -> Iterator[bool]:
        yield from self._send_all(stream, memoryview(frames))
        if told:
            self.told_s = self._clock()

    def _send_part(self, stream: Stream, part: Part) -> Iterator[bool]:
        """Answer the blocks of a part. Those that the mover brings may be under way when this ends, so that it never
        has nothing to do while there is a next part."""
        asked = self._asks.get(part.ask, AskPlaces())
        for index, block in enumerate(part.blocks):
            if self._ending:
                return
            put = None
            place = self._place(asked, part.first + index)
            if block is not None and place != NO_PLACE:
                while self.moving is not None and self.moving.ready and not self.moving.room:
                    if not self._answers:
                        break  # it does not come to this: places are given back before answers go
                    yield from self._send_answer(stream)
                if self.moving is not None and self.moving.ready and self.moving.room:
                    put = self.moving.put(block, self.fingerprint, place)
            if not self._ending:
                self._answers.append(_Answer(part, index, put))
            while self._answers and (self._answers[0].put is None or self._answers[0].put.ended):
                yield from self._send_answer(stream)
        if not self._ending:
            self._answers.append(_Answer(part, len(part.blocks)))
        if self.moving is not None:
            self.moving.flush()

    def _place(self, asked: AskPlaces, index: int) -> int:
        moving = self.moving
        if moving is None or not moving.ready or asked.offer != moving.offer.number:
            return NO_PLACE
        return asked.places[index] if index < len(asked.places) else NO_PLACE

    def _send_answer(self, stream: Stream) -> Iterator[bool]:
        """The first answer that waits; it stays there until it is out, for its lease's deadline."""
        part, at, put = self._answers[0]
        if put is not None and not put.ended and self.moving is not None:
            self.moving.flush()
        while put is not None and not put.ended and not self._ending:
            yield MOVER
        if self._ending:
            self._answers.clear()
            return
        self._half_out = True
        if at == len(part.blocks):
            self._sent(part)
        elif (block := part.blocks[at]) is None:
            absent = Lent(ask=part.ask, index=part.first + at)
            yield from self._send_all(stream, memoryview(framed(absent)))
        elif put is not None and not put.failed:
            yield from self._send_moved(stream, part, at, block, put)
        else:
            yield from self._send_block(stream, part, at, block)
        self._half_out = False
        self._answers.popleft()

    def _send_moved(self, stream: Stream, part: Part, at: int, block: LentBlock, put: Put) -> Iterator[bool]:
        head = _head(part, at, block, moved=True)
        self._counted(put.seal, head.size)
        self._count("moved", int(put.seal[0] == WHOLE))
        yield from self._send_all(stream, memoryview(framed(head) + put.seal))

    def _send_block(self, stream: Stream, part: Part, at: int, block: LentBlock) -> Iterator[bool]:
        head = _head(part, at, block)
        yield from self._send_all(stream, memoryview(framed(head)))
        checksum = begun_checksum(self.fingerprint, block.key)
        for view in block.views:
            yield from self._send_all(stream, view, checksum)
        # The slot may have changed hands between the bytes' way out and their way into the checksum.
        seal = bytes((BROKEN,)) + bytes(CHECKSUM_BYTES)
        if block.intact():
            seal = bytes((WHOLE,)) + checksum.digest()
        self._counted(seal, head.size)
        yield from self._send_all(stream, memoryview(seal))

    def _counted(self, seal: bytes, size: int) -> None:
        if seal[0] == WHOLE:
            self._count("blocks")
            self._count("bytes", size)
        else:
            self._count("broken")

    def _send_all(self, stream: Stream, data: memoryview, checksum: Digest | None = None) -> Iterator[bool]:
        while data:
            count = stream.send(data[:SENT_AT_ONCE])
            if not count:
                yield SOCKET
                continue
            self.said_s = self._clock()
            if checksum is not None:
                checksum.update(data[:count])
            data = data[count:]


def _head(part: Part, at: int, block: LentBlock, moved: bool = False) -> Lent:
    return Lent(
        ask=part.ask,
        index=part.first + at,
        there=True,
        size=sum(view.nbytes for view in block.views),
        moved=moved,
        engine_hash=block.engine_hash,
        group=block.group,
        facts=block.facts,
    )
