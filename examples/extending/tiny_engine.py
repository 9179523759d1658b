"""An engine: one request at a time, a device that forgets. See docs/guides/extending.md."""

from __future__ import annotations

import torch

import kvbm

BLOCK_TOKENS, HEAD_SIZE = 4, 8


class TinyEngine:
    """Answers a prompt with one number that depends on the KV of every token. Its device holds one prompt.

    The "model" adds up tokens: the KV of a token is its place in that sum, so it depends on all tokens before it, as
    in a transformer. `computed` counts the tokens whose KV was computed.
    """

    def __init__(self, device_blocks: int = 16) -> None:
        self.kv = torch.zeros(device_blocks, BLOCK_TOKENS, HEAD_SIZE)
        self.computed = 0
        # The size of a block, and the meaning of its bytes: a real engine names its weights by content here.
        self.layout = kvbm.BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=self.kv[0].nbytes)
        self.namespace = kvbm.Namespace(model="tiny-engine", fields=(("weights", "none: it adds up"),))

    def answer(self, prompt: list[int], manager: kvbm.BlockManager) -> float:
        """Load the part of the prompt that is held, compute the rest, keep its full blocks."""
        blocks = list(range(len(prompt) // BLOCK_TOKENS + 1))
        self.kv.zero_()  # the device's memory was another prompt's before
        # The last token is always computed: a real engine needs its logits.
        with manager.match(prompt[:-1]) as hit:
            arrived = hit.onboard({"kv": self.kv}, blocks)
        self._compute(prompt, arrived * BLOCK_TOKENS)
        manager.offload(prompt, {"kv": self.kv}, blocks)
        return float(self.kv.sum())

    def _compute(self, prompt: list[int], start: int) -> None:
        tokens = self.kv.view(-1, HEAD_SIZE)
        for position in range(start, len(prompt)):
            before = tokens[position - 1] if position else torch.zeros(HEAD_SIZE)
            tokens[position] = before + prompt[position] * torch.arange(1.0, HEAD_SIZE + 1)
            self.computed += 1
