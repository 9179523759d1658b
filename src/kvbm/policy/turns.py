"""The latest requests: what the next turn of a conversation wants to know of the one before it."""

from __future__ import annotations

from array import array

TURNS_MAX = 1 << 16
NOBODY = -1


class Turns:
    """The `capacity` latest requests in a ring, as parallel arrays. A request's number counts from 1; its place in
    the arrays is `find(number)`. 45 bytes each.

    `blocks` and `new_blocks` of its prompt, `code` of what is known of it (`features.request_code`), `gap_mean` of
    its conversation, `dropping` the moving share of turns that lost blocks and `drops` its level, `last_run` where
    its prompt ended.
    """

    def __init__(self, capacity: int = TURNS_MAX) -> None:
        self.capacity = capacity
        self.latest = 0
        self.number = array("q", [-1]) * capacity
        self.arrived_s = array("d", bytes(8 * capacity))
        self.blocks = array("i", bytes(4 * capacity))
        self.new_blocks = array("i", bytes(4 * capacity))
        self.code = array("i", bytes(4 * capacity))
        self.gap_mean = array("f", bytes(4 * capacity))
        self.dropping = array("f", bytes(4 * capacity))
        self.drops = bytearray(capacity)
        self.last_run = array("i", bytes(4 * capacity))

    def find(self, number: int) -> int:
        """The place of a request in the ring, or -1 when it was overwritten."""
        at = number % self.capacity
        return at if number > 0 and self.number[at] == number else NOBODY
