"""The double's device blocks: a prefix cache that forgets the block used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from rigs.trtllm.model import BLOCK_TOKENS

Content = tuple[Hashable, tuple[int, ...]]
"""All tokens up to a block's end, and what else shaped it."""


class Allocator:
    """Block 0 is nobody's, as the engine's dummy requests have it. Blocks without users keep their content until they
    are handed out."""

    def __init__(self, blocks: int, partial_reuse: bool) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._users: dict[int, int] = {}
        self._block_of: dict[Content, int] = {}
        self._content: dict[int, Content] = {}
        self._partial_reuse = partial_reuse

    @property
    def free(self) -> int:
        return len(self._free)

    def match(self, tokens: Sequence[int], extra: Hashable) -> tuple[list[int], int, int]:
        """Blocks that hold the beginning of the tokens; and with partial reuse how many tokens more, in which block."""
        found: list[int] = []
        limit = len(tokens) - 1
        while (len(found) + 1) * BLOCK_TOKENS <= limit:
            block = self._block_of.get((extra, tuple(tokens[: (len(found) + 1) * BLOCK_TOKENS])))
            if block is None:
                break
            found.append(block)
        if not self._partial_reuse:
            return found, 0, 0
        start = len(found) * BLOCK_TOKENS
        for (shape, held), block in self._block_of.items():
            if shape == extra and len(held) == start + BLOCK_TOKENS and held[:start] == tuple(tokens[:start]):
                alike = 0
                while (
                    start + alike < limit
                    and alike < BLOCK_TOKENS
                    and held[start + alike] == tokens[start + alike]
                ):
                    alike += 1
                if 0 < alike < BLOCK_TOKENS:
                    return found, alike, block
        return found, 0, 0

    def take(self, found: Sequence[int], count: int) -> list[int]:
        """The blocks that were found and `count` more, whose content is forgotten. There must be as many."""
        for block in found:
            self._users[block] = self._users.get(block, 0) + 1
            self._free.pop(block, None)
        fresh = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in fresh:
            self._users[block] = 1
            content = self._content.pop(block, None)
            if content is not None and self._block_of.get(content) == block:
                del self._block_of[content]
        return [*found, *fresh]

    def fill(self, block: int, tokens: Sequence[int], extra: Hashable) -> None:
        """The block is complete: it holds the last of these tokens."""
        content = extra, tuple(tokens)
        if content not in self._block_of:
            self._block_of[content] = block
            self._content[block] = content

    def forget(self) -> None:
        """Nothing that the blocks hold is found any more."""
        self._block_of.clear()
        self._content.clear()

    def give_back(self, table: Sequence[int]) -> None:
        """A request needs its blocks no more; the last ones are handed out first."""
        for block in reversed(table):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._free[block] = None
