"""Blocks that a forward pass reads while they are being loaded: nobody else may count on them yet."""

from __future__ import annotations

from collections.abc import Sequence


class Unconfirmed:
    """Requests whose loads run beside their forward pass: from which block on, and that block's hash."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, bytes]] = {}

    def add(self, request: str, block: int, block_hash: bytes) -> None:
        """The request loads its blocks from this one on."""
        self._first[request] = block, block_hash

    def confirmed(self, request: str) -> None:
        """Its load ended on all ranks."""
        self._first.pop(request, None)

    def shared(self, hashes: Sequence[bytes], computed: int) -> bool:
        """Whether the engine found blocks on the device that another request's forward pass is still loading.

        Only who loads them may read them until they are confirmed: if they fail, nobody else is to be told.
        """
        return any(
            first < min(computed, len(hashes)) and hashes[first] == block_hash
            for first, block_hash in self._first.values()
        )
