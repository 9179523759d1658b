"""Stores of an engine that says what its blocks are, so that they can be announced."""

from __future__ import annotations

from kvbm.block import BlockKey
from kvbm.hashing import join_keys
from kvbm.protocol import Commit, FromManager, Reserve, ReserveReply
from rigs.manager import LAYOUT, Client


def tokens(keys: list[BlockKey]) -> bytes:
    """Tokens that are a block's own."""
    return b"".join(key[: 4 * LAYOUT.block_tokens] for key in keys)


def store(leader: Client, number: int, keys: list[BlockKey], parent: bytes = b"", said: bool = True) -> None:
    leader.send(
        Reserve(store=number, parent=parent, keys=join_keys(keys), tokens=tokens(keys) if said else b"")
    )
    answer(leader, ReserveReply)
    leader.send(Commit(store=number))


def answer(leader: Client, kind: type) -> None:
    """The answer came; what is announced meanwhile waits to be heard."""
    seen: list[FromManager] = []
    leader.bench.until(lambda: seen.extend(leader.take()) or any(isinstance(each, kind) for each in seen))
    leader.inbox = [each for each in seen if not isinstance(each, kind)] + leader.inbox
