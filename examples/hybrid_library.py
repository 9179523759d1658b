"""A runtime whose model has layers with a sliding window beside layers of full attention keeps its KV with the library.

Run it: `python examples/hybrid_library.py`. It needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import kvbm

LAYERS, DEVICE_BLOCKS, BLOCK_TOKENS, WIDTH = 2, 64, 16, 64
LAYOUT = kvbm.BlockLayout(
    block_tokens=BLOCK_TOKENS,
    shard_bytes=LAYERS * BLOCK_TOKENS * WIDTH * 4,  # of a block of any group
    groups=(
        kvbm.Group(),  # all tokens
        kvbm.Group(kind=kvbm.GroupKind.WINDOW, reach=2),  # the last 2 blocks: a window of 32 tokens
    ),
)
TOKENS = list(range(9 * BLOCK_TOKENS))


class Runtime:
    """Stands for an engine: both groups share its tensors, and each block holds the group and its own number."""

    def __init__(self) -> None:
        self.kv_cache = {f"layer.{i}": torch.zeros(DEVICE_BLOCKS, BLOCK_TOKENS, WIDTH) for i in range(LAYERS)}
        self._free = list(range(DEVICE_BLOCKS))

    def allocate(self, needed: Iterable[int]) -> list[int | None]:
        """A group's table: a device block for each of the blocks that are needed, none for the others."""
        wanted = set(needed)
        return [
            self._free.pop(0) if block in wanted else None for block in range(max(wanted, default=-1) + 1)
        ]

    def compute(self, tables: Sequence[Sequence[int | None]]) -> None:
        """Fill the blocks of all tables."""
        for group, table in enumerate(tables):
            for block, device_block in enumerate(table):
                if device_block is not None:
                    for layer in self.kv_cache.values():
                        layer[device_block] = 100 * group + block + 1

    def holds(self, tables: Sequence[Sequence[int | None]]) -> bool:
        """Whether the blocks of all tables are what `compute` would have made of them."""
        return all(
            bool((layer[device_block] == 100 * group + block + 1).all())
            for layer in self.kv_cache.values()
            for group, table in enumerate(tables)
            for block, device_block in enumerate(table)
            if device_block is not None
        )


def main() -> None:
    """Compute eight blocks, keep them, and take the prompt up again in another runtime."""
    namespace = kvbm.Namespace(model="example", fields=(("weights", "none"),))
    with kvbm.BlockManager(LAYOUT, host="1MB", namespace=namespace) as manager:
        first = Runtime()
        # By now the window has left all but its last two blocks.
        tables = [first.allocate(range(8)), first.allocate((6, 7))]
        first.compute(tables)
        print(f"offloaded {manager.offload(TOKENS, first.kv_cache, tables)} blocks of two groups")
        again(manager, Runtime())


def again(manager: kvbm.BlockManager, engine: Runtime) -> None:
    """What a runtime does with a prompt: load what can be loaded, compute the rest."""
    tokens, kv_cache, skip = TOKENS, engine.kv_cache, 0
    with manager.match(tokens, skip=skip) as hit:
        tables = [engine.allocate(needed) for needed in hit.needed]
        computed = skip + hit.onboard(kv_cache, tables)
    right = engine.holds(tables)
    print(f"found a boundary at {computed} blocks, needed {[list(n) for n in hit.needed]}, equal: {right}")
    if computed < 8 or not right:
        raise SystemExit("the blocks that came are not the blocks that left")


if __name__ == "__main__":
    main()
