"""A process with a block manager of its own at a shared manager; it does what the lines of its standard input ask.

`store SEED` offloads a prompt, `load SEED` brings it back and answers how many of its blocks hold what was computed
for it, `hold SEED` finds it and stays inside the match. Each line is answered by a number.
"""

from __future__ import annotations

import random
import sys

import torch

import kvbm
from rigs.library import BLOCK_TOKENS, NAMESPACE, computed, content, layout, new_cache

BLOCKS = 5


def tokens_of(seed: int) -> list[int]:
    """A prompt of five blocks."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(BLOCKS * BLOCK_TOKENS)]


def store(manager: kvbm.BlockManager, seed: int) -> int:
    """Offload a prompt's blocks as a model computes them; how many were copied."""
    cache, tokens = new_cache(seed), tokens_of(seed)
    for i in range(BLOCKS):
        for name, layer in zip(cache, computed(tokens, i), strict=True):
            cache[name][i] = layer[0]
    return manager.offload(tokens, cache, range(BLOCKS))


def load(manager: kvbm.BlockManager, seed: int) -> int:
    """Bring them back; how many came, each of which must be right. -1 for one that is not."""
    cache, tokens = new_cache(seed + 1), tokens_of(seed)
    with manager.match(tokens) as hit:
        arrived = hit.onboard(cache, range(10, 10 + BLOCKS))
    right = all(torch.equal(content(cache, [10 + i]), computed(tokens, i)) for i in range(arrived))
    return arrived if right else -1


def answer(words: object) -> None:
    """One line, at once."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve the lines of standard input."""
    held = []
    with kvbm.BlockManager.connect(sys.argv[1], layout(), NAMESPACE, reply_timeout_s=30.0) as manager:
        answer("connected")
        for line in sys.stdin:
            command, seed = line.split()
            if command == "hold":
                held.append(manager.match(tokens_of(int(seed))))
                answer(held[-1].__enter__().blocks)
            else:
                answer({"store": store, "load": load}[command](manager, int(seed)))


if __name__ == "__main__":
    main()
