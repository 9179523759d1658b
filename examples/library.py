"""KVBM as a library: a KV cache that is thrown away and comes back, from host memory and from disk.

Run it: `python examples/library.py`. It needs torch, on a CPU or with CUDA.
"""

from __future__ import annotations

import tempfile

import torch

import kvbm

LAYERS, DEVICE_BLOCKS, HEADS, BLOCK_TOKENS, HEAD_SIZE = 4, 64, 2, 16, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Offload a prompt's blocks, wipe the device, load them back; then do it again with a new manager."""
    kv_cache = {
        f"layer.{i}": torch.randn(DEVICE_BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE, device=DEVICE)
        for i in range(LAYERS)
    }
    bytes_per_block = LAYERS * HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE * 4
    # The namespace gives the bytes their meaning; a real runtime puts the digest of its weights here.
    namespace = kvbm.Namespace(model="example", fields=(("weights", "none: random numbers"),))
    layout = kvbm.BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=bytes_per_block)
    tokens = list(range(8 * BLOCK_TOKENS))
    computed_in = [3, 1, 4, 15, 9, 2, 6, 5]
    before = {name: layer[computed_in].clone() for name, layer in kv_cache.items()}

    with tempfile.TemporaryDirectory() as directory:
        with kvbm.BlockManager(
            layout, host="8MB", disk="32MB", disk_dir=directory, namespace=namespace
        ) as manager:
            stored = manager.offload(tokens, kv_cache, computed_in)
            print(f"offloaded {stored} blocks of {bytes_per_block} bytes from {DEVICE}")
            show(manager, tokens, kv_cache, before)
            manager.flush()
        # Another manager, later: host memory is gone, the disk tier is found again.
        with kvbm.BlockManager(
            layout, host="8MB", disk="32MB", disk_dir=directory, namespace=namespace
        ) as manager:
            show(manager, tokens, kv_cache, before)


def show(
    manager: kvbm.BlockManager,
    tokens: list[int],
    kv_cache: dict[str, torch.Tensor],
    before: dict[str, torch.Tensor],
) -> None:
    """Wipe the device's KV cache, match, onboard into other blocks, compare."""
    for layer in kv_cache.values():
        layer.zero_()
    with manager.match(tokens) as hit:
        target = list(range(20, 20 + hit.blocks))
        arrived = hit.onboard(kv_cache, target)
    same = all(torch.equal(kv_cache[name][target], before[name][:arrived]) for name in kv_cache)
    print(f"found {hit.blocks} blocks (host {hit.host}, disk {hit.disk}), onboarded {arrived}, equal: {same}")
    if not same or arrived != hit.blocks:
        raise SystemExit("the blocks that came back are not the blocks that left")


if __name__ == "__main__":
    main()
