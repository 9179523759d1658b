"""One answer out of those of several managers, each of which holds the parts of blocks that its node's ranks have.

A block is held where every manager holds its part, and stored where every manager has a slot for its part or holds that
already. Nodes are counted as the parts of the engine are (`Hello.part`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from kvbm.block import KEY_BYTES
from kvbm.protocol import HELD, REFUSED, Commit, Lookup, LookupReply, Progress, Reserve, ReserveReply
from kvbm.step_plan import NodeSlots

FILLED = 0
"""In place of a slot in a common answer: `NodeSlots` has each node's."""


@dataclass(slots=True, eq=False)
class CommonLookup:
    """A lookup that was put to the managers of all nodes, of these lives (`epochs`).

    `blocks` is how many of the run all of them hold; `released`: the leader needs it no more.
    """

    asked: Lookup
    epochs: tuple[int, ...]
    blocks: int = -1
    released: bool = False
    _replies: dict[int, LookupReply] = field(default_factory=dict)
    _ready: dict[int, int] = field(default_factory=dict)
    _final: dict[int, bool] = field(default_factory=dict)
    _told: tuple[int, bool] = (0, False)

    @property
    def answered(self) -> bool:
        """All managers have answered."""
        return len(self._replies) == len(self.epochs)

    def lacks(self, node: int) -> bool:
        """Whether that node's manager has yet to answer."""
        return node not in self._replies

    def replied(self, node: int, reply: LookupReply) -> LookupReply | None:
        """A manager's answer; the common one with the last of them."""
        self._replies[node] = reply
        self._ready[node] = max(reply.ready, self._ready.get(node, 0))
        self._final[node] = self._final.get(node, False) or reply.ready == len(reply.slots)
        if not self.answered:
            return None
        replies = [self._replies[each] for each in range(len(self.epochs))]
        boundary = replies[0].boundary
        self.blocks = min(len(each.slots) for each in replies)
        if any(each.boundary != boundary for each in replies):
            # What several groups need at one boundary is no part of what they need at another.
            self.blocks = boundary = 0
        ready, _ = self._told = self._progress()
        no_room, refused = self._cut(replies) if not boundary else (0, 0)
        return LookupReply(
            lookup=reply.lookup,
            slots=(FILLED,) * self.blocks,
            generations=(0,) * self.blocks,
            ready=ready,
            sources=bytes(map(max, *(each.sources[: self.blocks] for each in replies))),
            no_room=no_room,
            refused=refused,
            arrival_s=max(each.arrival_s for each in replies),
            boundary=boundary,
            full=min(each.full for each in replies),
            verdicts=next((each.verdicts for each in replies if each.verdicts), ()),
        )

    def surplus(self) -> list[int]:
        """The nodes whose managers leased more than all have."""
        return [node for node, reply in self._replies.items() if len(reply.slots) > self.blocks]

    def progressed(self, node: int, progress: Progress) -> Progress | None:
        """Blocks arrived at one node, or will not come; what that means for all nodes, where it means anything."""
        self._ready[node] = max(progress.ready, self._ready.get(node, 0))
        self._final[node] = self._final.get(node, False) or progress.final
        if not self.answered or (now := self._progress()) == self._told:
            return None
        self._told = now
        # Each node has a clock of its own: when the last block came is not told.
        return Progress(lookup=self.asked.lookup, ready=now[0], final=now[1])

    def slots(self, first: int, end: int) -> tuple[NodeSlots, ...]:
        """Where some of the blocks lie at each node; empty where not all have answered."""
        if not self.answered or end > self.blocks:
            return ()
        replies = (self._replies[node] for node in range(len(self.epochs)))
        return tuple(
            NodeSlots(epoch=epoch, slots=reply.slots[first:end], generations=reply.generations[first:end])
            for epoch, reply in zip(self.epochs, replies, strict=True)
        )

    def _progress(self) -> tuple[int, bool]:
        """How many blocks are in host memory at every node, and whether no more will be."""
        nodes = range(len(self.epochs))
        coming = min(
            (min(self.blocks, self._ready[node]) for node in nodes if self._final[node]),
            default=self.blocks,
        )
        ready = min(coming, *(self._ready[node] for node in nodes))
        return ready, ready == coming

    def _cut(self, replies: Sequence[LookupReply]) -> tuple[int, int]:
        """By how many blocks all together are short of what every node has below host memory: for want of room, and
        refused ones."""
        found = min(len(each.slots) + each.refused + each.no_room for each in replies) - self.blocks
        short = min(replies, key=lambda each: len(each.slots))
        refused = min(short.refused, found)
        return min(short.no_room, found - refused), refused


@dataclass(slots=True, eq=False)
class CommonStore:
    """A reservation that was asked of the managers of all nodes, of these lives (`epochs`)."""

    asked: Reserve
    epochs: tuple[int, ...]
    _replies: dict[int, ReserveReply] = field(default_factory=dict)
    _filled: list[int] = field(default_factory=list)
    # Per node: its slots and their generations for each key; HELD or REFUSED where there is none.
    _slots: list[NodeSlots] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """All managers have answered."""
        return len(self._replies) == len(self.epochs)

    @property
    def empty(self) -> bool:
        """Nothing is to be copied: all nodes hold the blocks, or some have no slots."""
        return not self._filled

    def replied(self, node: int, reply: ReserveReply) -> ReserveReply | None:
        """A manager's answer; the common one with the last of them."""
        self._replies[node] = reply
        if not self.answered:
            return None
        for each, epoch in enumerate(self.epochs):
            given = self._replies[each]
            generations = iter(given.generations)
            self._slots.append(
                NodeSlots(
                    epoch=epoch,
                    slots=given.slots,
                    generations=tuple(next(generations) if slot >= 0 else 0 for slot in given.slots),
                )
            )
        common = tuple(map(_common, zip(*(each.slots for each in self._slots), strict=True)))
        self._filled = [i for i, slot in enumerate(common) if slot == FILLED]
        return ReserveReply(store=reply.store, slots=common, generations=(0,) * len(self._filled))

    def slots(self) -> tuple[NodeSlots, ...]:
        """The slots of the blocks that are to be copied, at each node."""
        return tuple(
            NodeSlots(
                epoch=each.epoch,
                slots=tuple(each.slots[i] for i in self._filled),
                generations=tuple(each.generations[i] for i in self._filled),
            )
            for each in self._slots
        )

    def commits(self, message: Commit) -> list[tuple[int, Commit]]:
        """What each node's manager is told that gave slots, or may yet. Slots that not all nodes gave are failed."""
        if not self.answered:
            keys = range(len(self.asked.keys) // KEY_BYTES)
            return list(zip(range(len(self.epochs)), repeat(_with_failed(message, keys)), strict=False))
        bad = {*message.failed}
        good = {i for position, i in enumerate(self._filled) if position not in bad}
        told = []
        for node, each in enumerate(self._slots):
            given = [i for i, slot in enumerate(each.slots) if slot >= 0]
            if given:
                failed = [position for position, i in enumerate(given) if i not in good]
                told.append((node, _with_failed(message, failed)))
        return told


def _common(slots: tuple[int, ...]) -> int:
    """What the answers for one block come to."""
    if REFUSED in slots:
        return REFUSED
    return FILLED if max(slots) >= 0 else HELD


def _with_failed(message: Commit, failed: Sequence[int]) -> Commit:
    return Commit(
        store=message.store, failed=tuple(failed), seconds=message.seconds, answer_s=message.answer_s
    )
