"""A toy model. The KV of a token is a function of the KV of the token before, as it lies in the cache: where that is
wrong, all that follows is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK_TOKENS = 4
LAYERS = 3
WIDTH = 2
VOCABULARY = 1000
_PRIME = (1 << 61) - 1
_START = 12_345


def mixed(state: int, *values: int) -> int:
    """A number that depends on all of these."""
    for value in values:
        state = (state * 1_000_003 + value * 7919 + 17) % _PRIME
    return state


class ToyModel:
    """One rank's part: its cache `[blocks, layers, K and V, tokens, width]` and the arithmetic on it.

    With `latent` there is one plane instead of K and V, and every rank computes the same.
    """

    def __init__(self, blocks: int, rank: int, latent: bool = False) -> None:
        self.share = 0 if latent else rank
        self.planes = 1 if latent else 2
        shape = (blocks, LAYERS, self.planes, BLOCK_TOKENS, WIDTH)
        self.cache = torch.full(shape, -1, dtype=torch.int64)

    def state(self, table: Sequence[int], position: int) -> int:
        """What the cache holds of the token at this position: the state from which the next one is computed."""
        if position < 0:
            return _START
        return int(self.cache[table[position // BLOCK_TOKENS], 0, 0, position % BLOCK_TOKENS, 0])

    def compute(
        self, table: Sequence[int], tokens: Sequence[int], start: int, end: int, shaped: Sequence[int]
    ) -> None:
        """Fill in the KV of the tokens from `start` up to `end`; `shaped` has what shapes each beside."""
        state = self.state(table, start - 1)
        for position in range(start, end):
            content = self.token(state, tokens[position], shaped[position])
            self.cache[table[position // BLOCK_TOKENS], :, :, position % BLOCK_TOKENS] = content
            state = int(content[0, 0, 0])

    def token(self, state: int, token: int, shaped: int) -> torch.Tensor:
        """The KV of one token, `[layers, planes, width]`."""
        first = mixed(state, token, shaped, self.share)
        values = [
            first if (layer, plane, place) == (0, 0, 0) else mixed(first, layer, plane, place)
            for layer in range(LAYERS)
            for plane in range(self.planes)
            for place in range(WIDTH)
        ]
        return torch.tensor(values, dtype=torch.int64).view(LAYERS, self.planes, WIDTH)

    def next_token(self, table: Sequence[int], tokens: Sequence[int]) -> int:
        """What follows these tokens, by their last one's KV."""
        return mixed(self.state(table, len(tokens) - 1), 1) % VOCABULARY

    def wrong(self, table: Sequence[int], tokens: Sequence[int], end: int, shaped: Sequence[int]) -> int:
        """The first of `end` positions whose bytes in the cache are not those of the tokens alone; -1 for none."""
        state = _START
        for position in range(end):
            expected = self.token(state, tokens[position], shaped[position])
            found = self.cache[table[position // BLOCK_TOKENS], :, :, position % BLOCK_TOKENS]
            if not torch.equal(found, expected):
                return position
            state = int(expected[0, 0, 0])
        return -1
