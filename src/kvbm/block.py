"""Blocks, their slots, and the only states that a slot can be in.

A *block* is the KV of a fixed run of tokens, all layers, one model. A *slot* is one block's place in
a tier. This file holds the vocabulary that every other package shares; it imports nothing of ours.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""The identity of a block's content inside its namespace: 32 bytes, a chained hash (see `hashing`)."""

SlotIndex = NewType("SlotIndex", int)
"""A slot's position in one tier; slot i is the same block on every rank."""

NO_SLOT = -1
"""In place of a slot: the block has none."""

KEY_BYTES = 32

GROUP_MAX = 0xFFFF
"""A *group* is the blocks of one kind of layers in a model that has several; a number from 0, which means "the only
kind", to this."""


NO_COUNT = 0
"""In place of the number of blocks of a tier that is on: how many fit into a store that others share is not known."""


class BlockState(enum.IntEnum):
    """The state of one slot.

    ::

        free ──reserve──▶ filling ──commit──▶ resident ──evict──▶ free
                            └──────────abort──────────────────────▶ free
    """

    FREE = 0
    FILLING = 1
    RESIDENT = 2


class Transition(enum.Enum):
    """The four moves a slot can make. Nothing else changes a `BlockState`."""

    RESERVE = "reserve"
    COMMIT = "commit"
    ABORT = "abort"
    EVICT = "evict"


TRANSITIONS: dict[Transition, tuple[BlockState, BlockState]] = {
    Transition.RESERVE: (BlockState.FREE, BlockState.FILLING),
    Transition.COMMIT: (BlockState.FILLING, BlockState.RESIDENT),
    Transition.ABORT: (BlockState.FILLING, BlockState.FREE),
    Transition.EVICT: (BlockState.RESIDENT, BlockState.FREE),
}
"""The one transition table: from and to. The diagram of `BlockState` draws it."""


class Tier(enum.IntEnum):
    """The tiers, top down, as KVBM names them."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    REMOTE = 4


def counted_as_disk(sources: bytes) -> bytes:
    """The tiers of blocks, a byte each, where host memory is no tier but the way to disk: there, all are disk's."""
    return sources.replace(bytes((Tier.HOST,)), bytes((Tier.DISK,)))


class Outcome(enum.Enum):
    """How an operation on a tier ended, or where it stands.

    MISS means "not there"; RETRY means "there perhaps, ask again"; THROTTLED means "refused to keep a
    bound"; a caller treats the last two as a miss for this request but must not forget the block.
    """

    HIT = "hit"
    PENDING = "pending"
    RETRY = "retry"
    THROTTLED = "throttled"
    MISS = "miss"


def alike(flags: bytes | bytearray, slots: Sequence[int]) -> int:
    """How many of the first of these slots have the flag that the first one has."""
    found = bytes(map(flags.__getitem__, slots))
    return len(found) - len(found.lstrip(found[:1]))
