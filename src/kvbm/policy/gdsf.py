"""Greedy-Dual-Size-Frequency, leaves before parents: blocks used often and expensive to compute again stay.

Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Laboratories report
HPL-98-69R1, 1998.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass

from kvbm.block import BlockState
from kvbm.policy.leaf_first import BlockTree

_FREE = int(BlockState.FREE)
_FILLING = int(BlockState.FILLING)
_RESIDENT = int(BlockState.RESIDENT)
_SPARE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The seconds that a hit on one block saves: computing it again, less loading it from the tier.

    Computing a token takes `prefill_s_per_token` for the layers' matrices, and `attention_s_per_token_pair` more for
    each token before it. A block is `block_bytes` long and comes out of the tier with `load_bytes_per_s`.

    The defaults describe a block of 16 tokens of a model with 8 billion parameters, 32 layers of 32 heads and 8 KV
    heads of 128, in bfloat16, on a device that computes 400 TFLOP/s of it, beside a tier that gives 20 GB/s: 16
    GFLOP a token, 4 × 32 × 4096 FLOP a pair of tokens, 128 KiB a token. Only the ratio of the three terms matters.
    """

    block_tokens: int = 16
    prefill_s_per_token: float = 4e-5
    attention_s_per_token_pair: float = 1.3e-9
    block_bytes: int = 2 * 1024 * 1024
    load_bytes_per_s: float = 2e10

    def saved_s(self, depth: int) -> float:
        """Seconds that a hit saves on a block with `depth` blocks before it in its chain, at least 0."""
        pairs = self.block_tokens * (self.block_tokens * depth + self.block_tokens / 2)
        prefill_s = self.prefill_s_per_token * self.block_tokens + self.attention_s_per_token_pair * pairs
        return max(0.0, prefill_s - self.block_bytes / self.load_bytes_per_s)


class Gdsf:
    """Leaf-first GDSF over `slot_count` slots.

    A block's rank is set at each use: the tier's age, plus its uses so far times what each saves. Among the unleased
    leaves the one of lowest rank goes, of equal ones the one used longest ago; the age is the highest rank of any
    victim so far. All blocks of a tier are of one size, so the paper's division by size is left out. With a cost that
    is the same for every block this is LFU with dynamic ageing. A block whose parent is not in the tier counts as the
    first of its chain.

    A use is three writes to arrays; the queue of leaves is corrected when victims are asked for, so a victim costs
    O(log n) amortised. Memory: 57 bytes a slot, and one queue entry per leaf and at most as many outdated ones.
    """

    def __init__(self, slot_count: int, cost: BlockCost | None = None) -> None:
        assert slot_count > 0, f"a tier has at least one slot, not {slot_count}"
        self._cost = BlockCost() if cost is None else cost
        self.tree = BlockTree(slot_count)
        self._state = bytearray(slot_count)
        self._depth = array("i", bytes(4 * slot_count))
        self._saved_s = array("d", bytes(8 * slot_count))
        # A rank is (rank, tick of the last use); both only rise while a block is in the tier.
        self._rank = array("d", bytes(8 * slot_count))
        self._tick = array("q", bytes(8 * slot_count))
        self._uses = array("I", bytes(4 * slot_count))
        self._age = 0.0
        self._now_tick = 0
        # Leaves by rank. A slot's entry is the one with its `_queued` tick (0: none); others are outdated.
        self._leaves: list[tuple[float, int, int]] = []
        self._queued = array("q", bytes(8 * slot_count))
        self._outdated = 0

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        """Count a use of each block that is here, and raise its rank."""
        self._now_tick += 1
        now_tick, age = self._now_tick, self._age
        uses, rank, tick, saved_s = self._uses, self._rank, self._tick, self._saved_s
        for slot in slots:
            if slot >= 0:
                uses[slot] = count = uses[slot] + 1
                rank[slot] = age + count * saved_s[slot]
                tick[slot] = now_tick

    def finished(self, key: Hashable, output_tokens: int, now_s: float) -> None:
        """Not used."""

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        """Begin to fill the slots; that is the first use of these blocks."""
        if not slots:
            return
        self._now_tick += 1
        if parent >= 0 and self._queued[parent] and self.tree.child[parent] < 0:
            self._outdated += 1
        self.tree.append(slots, parent)
        depth = self._depth[parent] + 1 if parent >= 0 else 0
        for slot in slots:
            assert self._state[slot] == _FREE, f"slot {slot} is in use"
            self._state[slot] = _FILLING
            self._depth[slot] = depth
            self._saved_s[slot] = saved_s = self._cost.saved_s(depth)
            self._uses[slot] = 1
            self._rank[slot] = self._age + saved_s
            self._tick[slot] = self._now_tick
            depth += 1
        self._tidy()

    def evictable(self, slots: Iterable[int]) -> None:
        """Queue those of the slots that are leaves and not queued already."""
        queued, child, state = self._queued, self.tree.child, self._state
        for slot in slots:
            state[slot] = _RESIDENT
            if child[slot] < 0 and not queued[slot]:
                self._enqueue(slot)

    def removed(self, slots: Iterable[int]) -> None:
        """Empty the slots; their parents may become leaves."""
        for slot in slots:
            assert self._state[slot] != _FREE, f"slot {slot} is empty already"
            if self._queued[slot]:
                self._queued[slot] = 0
                self._outdated += 1
            self._empty(slot)
        self._tidy()

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """The unleased leaves of lowest rank, each before its parent; every newcomer is worth a slot."""
        chosen: list[int] = []
        leaves, state, child = self._leaves, self._state, self.tree.child
        rank, tick, queued = self._rank, self._tick, self._queued
        while leaves and len(chosen) < needed:
            queued_rank, queued_tick, slot = leaves[0]
            if queued_tick != queued[slot]:
                heapq.heappop(leaves)
            elif state[slot] != _RESIDENT or child[slot] >= 0 or slot in leased:
                # It comes back when its lease ends, or when it becomes a leaf again.
                heapq.heappop(leaves)
                queued[slot] = 0
            elif queued_tick < tick[slot]:
                queued[slot] = tick[slot]
                heapq.heapreplace(leaves, (rank[slot], tick[slot], slot))
            else:
                heapq.heappop(leaves)
                queued[slot] = 0
                self._age = max(self._age, queued_rank)
                self._empty(slot)
                chosen.append(slot)
        return chosen

    def _enqueue(self, slot: int) -> None:
        self._queued[slot] = self._tick[slot]
        heapq.heappush(self._leaves, (self._rank[slot], self._tick[slot], slot))

    def _empty(self, slot: int) -> None:
        """Take a slot out of the tree, and queue its parent if that may go now."""
        self._state[slot] = _FREE
        parent = self.tree.take_out(slot)
        if parent >= 0 and self._state[parent] == _RESIDENT and not self._queued[parent]:
            self._enqueue(parent)

    def _tidy(self) -> None:
        """Drop the entries of removed blocks, and of those that got continuations, once they are half of the queue."""
        if self._outdated < _SPARE_ENTRIES or 2 * self._outdated < len(self._leaves):
            return
        child, queued = self.tree.child, self._queued
        kept = []
        for entry in self._leaves:
            _, queued_tick, slot = entry
            if queued_tick != queued[slot]:
                continue
            if child[slot] < 0:
                kept.append(entry)
            else:
                queued[slot] = 0
        heapq.heapify(kept)
        self._leaves = kept
        self._outdated = 0
