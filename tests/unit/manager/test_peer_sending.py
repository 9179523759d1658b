"""What goes out to a reader that is being sent away."""

from __future__ import annotations

from typing import cast

from kvbm.clock import ManualClock
from kvbm.manager.peer_messages import LentBlock, Part
from kvbm.manager.peer_sending import Sending
from kvbm.tiers.host import HostArena
from kvbm.tiers.peers.wire import Stream
from rigs.peers import LAYOUT, keys_of

KEYS = keys_of(3)
SIZE = LAYOUT.block_bytes


class SlowSocket:
    """Takes `room` more bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, 0

    def send(self, data: memoryview) -> int:
        count = min(self.room, data.nbytes)
        self.room -= count
        self.taken += count
        return count


def test_a_block_that_is_half_out_keeps_its_deadline_and_no_other_one_begins() -> None:
    arena = HostArena(LAYOUT, len(KEYS), touch_threads=0)
    over: list[Part] = []
    sending = Sending({}, ManualClock(1.0), lambda name, number=1: None, over.append)
    sending.fingerprint = b"f"
    blocks = [
        LentBlock(key, arena.slot_views(slot), arena, slot, arena.generation(slot), b"", 0, b"")
        for slot, key in enumerate(KEYS)
    ]
    slow = SlowSocket(SIZE // 2)
    stream = cast(Stream, slow)
    sending.lend(Part(ask=1, first=0, blocks=blocks, last=True, lease=7, deadline_s=9.0))
    assert sending.send(stream), "the socket takes no more"
    assert sending.deadline_s() == 9.0
    sending.only_frames()
    assert sending.deadline_s() == 9.0 and not sending.quiet
    slow.room = 100 * SIZE
    assert not sending.send(stream)
    assert sending.quiet and sending.deadline_s() is None
    assert SIZE < slow.taken < 2 * SIZE
    assert not over, "its lease ends with the connection"
    arena.close()
