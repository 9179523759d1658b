"""A simulated machine: how many seconds it takes to compute tokens and to move bytes.

The defaults are one H100 serving an 8-billion-parameter model: 30,000 prompt tokens a second (half of its dense bf16
peak), PCIe 5.0 x16, one good NVMe drive. All of them are options of `kvbm simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds. `block_bytes` is the KV of one block, on all ranks together.

    A token at position p takes (1 + p / attention_tokens) / prefill_tokens_per_s: attention grows with the tokens
    before it, and at `attention_tokens` of them costs as much as everything else. From a model's shape that is about
    parameters / (2 × layers × query heads × head size): 30,500 for Llama 3.1 8B, 53,000 for 70B.
    """

    block_bytes: int
    prefill_tokens_per_s: float = 30_000.0
    attention_tokens: float = 30_000.0
    host_bytes_per_s: float = 50e9
    disk_read_bytes_per_s: float = 6e9
    disk_write_bytes_per_s: float = 3e9

    def prefill_s(self, start: Any, end: int) -> Any:
        """Seconds to compute the tokens from `start` (or an array of starts) up to `end`; those before are loaded."""
        return (
            (end - start) * (1.0 + (start + end) / (2.0 * self.attention_tokens)) / self.prefill_tokens_per_s
        )

    def prompt_s(self, cached_tokens: int, prompt_tokens: int) -> float:
        """Seconds to compute a prompt of which so many tokens are loaded: at least its last, to sample from."""
        return float(self.prefill_s(max(min(cached_tokens, prompt_tokens - 1), 0), prompt_tokens))

    def block_s(self, bytes_per_s: float) -> float:
        """Seconds for one block over a link of that speed."""
        return self.block_bytes / bytes_per_s


@dataclass(slots=True)
class Link:
    """A link that carries one transfer after the other, in the order of `send`."""

    bytes_per_s: float
    free_s: float = 0.0
    sent_bytes: int = field(default=0)

    def send(self, now_s: float, size_bytes: int) -> float:
        """Queue a transfer; the time at which its last byte is through."""
        self.free_s = max(now_s, self.free_s) + size_bytes / self.bytes_per_s
        self.sent_bytes += size_bytes
        return self.free_s
