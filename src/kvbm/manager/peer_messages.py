"""What the manager's loop and the threads that serve readers on other nodes say to each other (see `lending`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvbm.block import BlockKey
from kvbm.tiers.host import HostArena
from kvbm.tiers.peers.wire import Held

# ---- what the loop posts to a thread


class LentBlock(NamedTuple):
    """A block of a part. `arena` tells whether the slot still is of this generation; a name as tiers keep it."""

    key: BlockKey
    views: Sequence[memoryview]
    arena: HostArena
    slot: int
    generation: int
    engine_hash: bytes
    group: int
    facts: bytes

    def intact(self) -> bool:
        """Whether the slot has held the block until now."""
        try:
            return self.arena.generation(self.slot) == self.generation
        except ValueError:  # that memory has been given up
            return False


class Admitted(NamedTuple):
    """The reader is let in; `fingerprint` is of the namespace that it asked for."""

    fingerprint: bytes


class Refused(NamedTuple):
    """The reader is not let in, or no longer."""

    line: str


class Part(NamedTuple):
    """The answer for the blocks from `first` on of an ask; None for one that is not held.

    `lease` is to be given back (0: nothing was leased), by `deadline_s` at the latest. `last`: it ends the ask.
    """

    ask: int
    first: int
    blocks: Sequence[LentBlock | None]
    lease: int
    deadline_s: float
    last: bool


class Reader(Protocol):
    """A reader, as the loop sees it."""

    def post(self, message: Admitted | Refused | Part | Held) -> None:
        """Hand this to its thread; never waits."""


# ---- what a thread asks the loop for


class Enter(NamedTuple):
    """Let this reader in; the fields are those of its `wire.Greeting`."""

    reader: Reader
    fingerprint: bytes
    slot_bytes: int
    shard_count: int
    known_max: int


class AskFor(NamedTuple):
    """Blocks to lease; a reader has a bounded number of these open, which its thread sees to."""

    reader: Reader
    number: int
    keys: Sequence[BlockKey]


class GiveBack(NamedTuple):
    """A part has been sent: its lease may end."""

    reader: Reader
    lease: int


class TellMore(NamedTuple):
    """The last `Held` has been sent."""

    reader: Reader


class Leave(NamedTuple):
    """The reader has gone; its leases end. It may never have been let in."""

    reader: Reader


Request = Enter | AskFor | GiveBack | TellMore | Leave
