"""Two processes share the KV blocks of one prompt, one after the other, through a store and nothing else.

Run it: `python examples/store_library.py [URL]`, of a bucket, a Redis or a directory that is there. It needs torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import torch

import kvbm

LAYERS, DEVICE_BLOCKS, BLOCK_TOKENS, WIDTH = 4, 32, 16, 64
LAYOUT = kvbm.BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=LAYERS * BLOCK_TOKENS * WIDTH * 4)
# What gives the bytes their meaning: a real runtime puts the digest of its weights here.
NAMESPACE = kvbm.Namespace(model="example", fields=(("weights", "none"), ("kv", "float32, tokens first")))
TOKENS = list(range(8 * BLOCK_TOKENS))


def new_cache() -> dict[str, torch.Tensor]:
    """An empty KV cache."""
    return {f"layer.{i}": torch.zeros(DEVICE_BLOCKS, BLOCK_TOKENS, WIDTH) for i in range(LAYERS)}


def offload(url: str) -> None:
    """The process that computes the prompt: its blocks hold their own numbers."""
    kv_cache = new_cache()
    for layer in kv_cache.values():
        layer += torch.arange(DEVICE_BLOCKS).view(-1, 1, 1)
    with kvbm.BlockManager(LAYOUT, host="16MB", remote=url, namespace=NAMESPACE) as manager:
        print(f"one process offloaded {manager.offload(TOKENS, kv_cache, range(8))} blocks")


def onboard(url: str) -> None:
    """The process that does not need to. It may run on another node."""
    kv_cache = new_cache()
    with kvbm.BlockManager(LAYOUT, host="16MB", remote=url, namespace=NAMESPACE) as manager:
        with manager.match(TOKENS) as hit:
            arrived = hit.onboard(kv_cache, range(20, 20 + hit.blocks))
    right = all(bool((layer[20 + i] == i).all()) for layer in kv_cache.values() for i in range(arrived))
    print(f"another process found {hit.remote} blocks in the store and onboarded {arrived}, equal: {right}")
    if not right or arrived < 8:
        raise SystemExit("the blocks that came are not the blocks that left")


def main(url: str) -> None:
    """The two processes one after the other."""
    for part in ("offload", "onboard"):
        subprocess.run([sys.executable, __file__, part, url], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        {"offload": offload, "onboard": onboard}[sys.argv[1]](sys.argv[2])
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(f"file://{directory}")
