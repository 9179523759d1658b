"""Blocks that a forward pass reads while they are being loaded: no other request may use them yet."""

from __future__ import annotations

from collections.abc import Sequence


class Unconfirmed:
    """Requests whose loads run beside their forward pass: the first loaded block of each, and its hash."""

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

        If such a load fails, the engine recomputes only the request that loads: no other may have read the blocks.
        """
        return any(
            first < min(computed, len(hashes)) and hashes[first] == block_hash
            for first, block_hash in self._first.values()
        )
