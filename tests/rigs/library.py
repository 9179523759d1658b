"""A KV cache of torch tensors, and what a model would have computed in it."""

from __future__ import annotations

import random
import zlib

import torch

import kvbm

BLOCK_TOKENS = 8
NAMESPACE = kvbm.Namespace(model="test", fields=(("weights", "1"),))
LAYERS = 3
DEVICE_BLOCKS = 32
BLOCK_SHAPE = (2, BLOCK_TOKENS, 16)
SHARD_BYTES = LAYERS * 2 * BLOCK_TOKENS * 16 * 4


def layout() -> kvbm.BlockLayout:
    """The layout of the cache that `new_cache` makes."""
    return kvbm.BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=SHARD_BYTES)


def new_cache(seed: int) -> dict[str, torch.Tensor]:
    """A cache full of noise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}": torch.randn(DEVICE_BLOCKS, *BLOCK_SHAPE, generator=generator) for i in range(LAYERS)
    }


def content(cache: dict[str, torch.Tensor], blocks: list[int]) -> torch.Tensor:
    """What these blocks hold, in all layers."""
    return torch.stack([cache[f"layer.{i}"][blocks] for i in range(LAYERS)])


def computed(tokens: list[int], block: int) -> torch.Tensor:
    """The KV of one block, as a model computes it: a function of all tokens up to its end."""
    prefix = repr(tokens[: (block + 1) * BLOCK_TOKENS]).encode()
    generator = torch.Generator().manual_seed(zlib.crc32(prefix))
    return torch.randn(LAYERS, 1, *BLOCK_SHAPE, generator=generator)


def prompt(rng: random.Random, blocks: int) -> list[int]:
    """Random tokens: so many whole blocks, and part of another."""
    return [rng.randrange(1000) for _ in range(blocks * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS))]
