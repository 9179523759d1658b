"""The latest requests, kept for the next turns of their conversations."""

from __future__ import annotations

from array import array

from kvbm.policy.gittins import features

TURNS_MAX = 1 << 16


class Turns:
    """The `capacity` latest requests in a ring, as parallel arrays. A request's number counts from 1; its index in
    the arrays is `find(number)`. 57 bytes each.

    `blocks` and `new_blocks` are those of its prompt, `turn` says which turn of its conversation it is, `code` its
    features (`features.request_code`), and `last_run` the run in which its prompt ended. `session`, `said`, `expect_s`
    and `early_scale` are from `words`: the number of its session (0: none is known), what is believed of its
    conversation, after how many seconds it is expected to go on, and how fast its runs age while it is not finished.
    """

    def __init__(self, capacity: int = TURNS_MAX) -> None:
        self.capacity = capacity
        self.latest = 0
        self.number = array("q", [-1]) * capacity
        self.arrived_s = array("d", bytes(8 * capacity))
        self.blocks = array("i", bytes(4 * capacity))
        self.new_blocks = array("i", bytes(4 * capacity))
        self.code = array("i", bytes(4 * capacity))
        self.turn = array("i", bytes(4 * capacity))
        self.last_run = array("i", bytes(4 * capacity))
        self.session = array("i", bytes(4 * capacity))
        self.said = bytearray(capacity)
        self.expect_s = array("f", bytes(4 * capacity))
        self.early_scale = array("d", bytes(8 * capacity))

    def find(self, number: int) -> int:
        """The index of a request in the ring, or -1 when it was overwritten."""
        at = number % self.capacity
        return at if number > 0 and self.number[at] == number else -1

    def begin(self, before: int, now_s: float, blocks: int, known: int) -> int:
        """Note a request of so many blocks, the first `known` of which were asked for before. Returns its number.

        `before` is the number of the turn that it continues, 0 when there is none.
        """
        self.latest += 1
        number, at = self.latest, self.latest % self.capacity
        last = self.find(before)
        self.number[at], self.arrived_s[at] = number, now_s
        self.turn[at] = self.turn[last] + 1 if last >= 0 else 1
        self.blocks[at], self.new_blocks[at] = blocks, blocks - known
        self.session[at], self.said[at], self.expect_s[at], self.early_scale[at] = 0, 0, 0.0, 1.0
        self.finish(at, -1)
        return number

    def finish(self, at: int, output_tokens: int) -> None:
        """Note how many tokens the request at this index generated (-1: not known yet)."""
        self.code[at] = features.request_code(
            self.turn[at], output_tokens, self.new_blocks[at], self.blocks[at]
        )
