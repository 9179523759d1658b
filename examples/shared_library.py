"""Two processes share the KV blocks of one prompt, through a manager that a third one runs.

Run it: `python examples/shared_library.py`. It needs torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

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


def offload(socket: str) -> None:
    """The process that computes the prompt: its blocks hold their own numbers."""
    kv_cache = new_cache()
    for layer in kv_cache.values():
        layer += torch.arange(DEVICE_BLOCKS).view(-1, 1, 1)
    with kvbm.BlockManager.connect(socket, LAYOUT, NAMESPACE, join_timeout_s=30) as manager:
        print(f"one process offloaded {manager.offload(TOKENS, kv_cache, range(8))} blocks")


def onboard(socket: str) -> None:
    """The process that does not need to."""
    kv_cache = new_cache()
    with (
        kvbm.BlockManager.connect(socket, LAYOUT, NAMESPACE, join_timeout_s=30) as manager,
        manager.match(TOKENS) as hit,
    ):
        arrived = hit.onboard(kv_cache, range(20, 20 + hit.blocks))
    right = all(bool((layer[20 + i] == i).all()) for layer in kv_cache.values() for i in range(arrived))
    print(f"another process found {hit.blocks} blocks and onboarded {arrived}, equal: {right}")
    if not right or arrived < 8:
        raise SystemExit("the blocks that came are not the blocks that left")


def main() -> None:
    """Run a manager, and the two processes one after the other."""
    with tempfile.TemporaryDirectory() as directory:
        socket = str(Path(directory) / "manager.sock")
        command = ["kvbm.cli.main", "manager", "--socket", socket, "--host-memory", "16MB"]
        manager = subprocess.Popen([sys.executable, "-m", *command])
        try:
            for part in ("offload", "onboard"):
                subprocess.run([sys.executable, __file__, part, socket], check=True)
        finally:
            manager.terminate()
            manager.wait()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        {"offload": offload, "onboard": onboard}[sys.argv[1]](sys.argv[2])
    else:
        main()
