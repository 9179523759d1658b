"""A request as the leader sees it: the engine's calls about it, the answers, and the leader's own notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgspec

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.hashing import derive_key


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks after the computed ones can be loaded. With `later`, the engine should ask again.

    With `layerwise` the request may be computed in the same step that loads them.
    """

    blocks: int = 0
    later: bool = False
    layerwise: bool = False


class Scheduled(NamedTuple):
    """A request in an engine step: how many of its leading blocks are complete after it, and its block table.

    The step writes to blocks of the table from `written_from` on. The table is only asked for when it is needed.
    """

    request: str
    complete_blocks: int
    device_blocks: Callable[[], Sequence[int]]
    written_from: int = 0


@dataclass(slots=True)
class Tracked:
    """One request of the engine, as far as the leader follows it."""

    hashes: Sequence[bytes]
    extras: bytes
    keys: list[BlockKey] = field(default_factory=list)
    keyed_for: bytes = b""
    stored: int = 0
    computed: int = 0
    layerwise: bool = False
    asked_from: int | None = None
    asked_blocks: int = 0
    begun: bool = False
    outdated: bool = False
    """It is computed from KV that must not be stored under the present keys: none of its blocks is stored."""

    def extend_keys(self, count: int, fingerprint: bytes, extras: bytes) -> None:
        """Add the keys of blocks up to number `count`, as far as the engine has hashed them.

        The manager keeps namespaces apart. So the engine's own hash is the key, unless its length is not that of a key,
        or there are `extras`, which the hash does not cover.
        """
        fresh = cast(Sequence[BlockKey], self.hashes[len(self.keys) : count])
        if not extras and set(map(len, fresh)) <= {KEY_BYTES}:
            self.keys.extend(fresh)  # thousands at once, in the scheduler's thread
            return
        for block_hash in fresh:
            whole = not extras and len(block_hash) == KEY_BYTES
            self.keys.append(block_hash if whole else derive_key(fingerprint, block_hash, extras))

    def engine_hashes(self, start: int, end: int) -> bytes:
        """`Reserve.hashes` of these blocks: the engine's own hash of each.

        Empty where the keys are those hashes; zeros for a hash that is not as long as a key.
        """
        own = list(self.hashes[start:end])
        if own == self.keys[start:end]:
            return b""
        return b"".join(each if len(each) == KEY_BYTES else bytes(KEY_BYTES) for each in own)
