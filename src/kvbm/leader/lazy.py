"""Lazy offload: blocks are stored when the engine is about to hand their device memory to others, not before.

A block that is still on the device needs no copy; one that is hit there again and again is stored once at the end, or
never. The price: blocks that the engine drops between two looks are lost, and all of them are when it is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.hashing import split_keys
from kvbm.leader.device import DeviceBlocks
from kvbm.leader.retry import Retry
from kvbm.leader.stores import Answered
from kvbm.leader.tracked import Keep, Scheduled
from kvbm.step_plan import LoadPlan

LEAVING_RETRY_S_MAX = 0.4
"""Free blocks do not wait for long: soon the engine hands them out."""


class LeavingBlocks(NamedTuple):
    """Blocks to store, a chain, parents first; `parent` is the key before the first one, `hashes` as in `Reserve`."""

    parent: BlockKey | None
    keys: list[BlockKey]
    device_blocks: list[int]
    tags: list[Hashable]
    hashes: bytes
    keep: Keep | None = None


class _Entry(NamedTuple):
    key: BlockKey
    parent: BlockKey | None
    tag: Hashable
    engine_hash: bytes
    keep: Keep | None


class Unsaved:
    """Complete blocks that lie on the device and are not stored yet. Bounded by the number of device blocks."""

    def __init__(self, device: DeviceBlocks) -> None:
        self._device = device
        self._by_block: dict[int, _Entry] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._retry = Retry()

    def __len__(self) -> int:
        return len(self._by_block)

    @property
    def refused(self) -> bool:
        """Whether the manager had no slot for some of what was given out last."""
        return self._retry.failures > 0

    def note(
        self,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        device_blocks: Sequence[int],
        hashes: bytes = b"",
        keep: Keep | None = None,
    ) -> None:
        """A request has filled these device blocks, or shares them. `hashes` is as in `Reserve`."""
        for place, (key, block) in enumerate(zip(keys, device_blocks, strict=True)):
            tag = self._device.tag(block)
            self._forget(block)
            # The same content may lie in two blocks: the later one stands for it.
            self._forget(self._block_of.get(key, -1))
            if tag is not None:
                engine_hash = hashes[place * KEY_BYTES : (place + 1) * KEY_BYTES]
                self._by_block[block] = _Entry(key, parent, tag, engine_hash, keep)
                self._block_of[key] = block
            parent = key

    def answered(self, answer: Answered, now_s: float) -> None:
        """The manager's answer for blocks that `leaving` gave out: those that it refused are noted again, if they are
        on the device still, and nothing is given out for a while."""
        asked = answer.asked
        if asked is None:
            return
        if not answer.refused:
            self._retry.succeeded()
            return
        if now_s >= self._retry.due_s:  # else this was asked before the last refusal came
            self._retry.failed(now_s, LEAVING_RETRY_S_MAX)
        keys, start = split_keys(asked.keys), answer.taken
        parent = keys[start - 1] if start else BlockKey(asked.parent) or None
        for place in range(start, len(keys)):
            key, block, tag = keys[place], answer.device_blocks[place], answer.tags[place]
            if block not in self._by_block and key not in self._block_of and self._device.tag(block) == tag:
                engine_hash = asked.hashes[place * KEY_BYTES : (place + 1) * KEY_BYTES]
                self._by_block[block] = _Entry(key, parent, tag, engine_hash, answer.keep)
                self._block_of[key] = block
            parent = key

    def leaving(self, limit: int, blocks_max: int, now_s: float = 0.0) -> list[LeavingBlocks]:
        """Take the unsaved blocks among the next `limit` to be handed out, each with its unsaved ancestors.

        At most about `blocks_max` blocks in all: the others are taken in the next step. None while the manager has no
        slots (`answered`).
        """
        if now_s < self._retry.due_s:
            return []
        chains: list[LeavingBlocks] = []
        taken = 0
        for block in self._device.next_out(limit):
            if taken >= blocks_max:
                break
            entry = self._by_block.get(block)
            if entry is None:
                continue
            if self._device.tag(block) != entry.tag:
                self._forget(block)
                continue
            chain = self._take_chain(block)
            chains.append(chain)
            taken += len(chain.keys)
        return chains

    def clear(self) -> None:
        """Keys have changed: forget all blocks."""
        self._by_block.clear()
        self._block_of.clear()

    def _take_chain(self, block: int) -> LeavingBlocks:
        found: list[tuple[int, _Entry]] = []
        place: int | None = block
        while place is not None:
            entry = self._by_block[place]
            self._forget(place)
            if self._device.tag(place) != entry.tag:
                break  # handed out already: its children are a chain of their own
            found.append((place, entry))
            place = self._block_of.get(entry.parent) if entry.parent is not None else None
        found.reverse()
        derived = any(entry.engine_hash for _, entry in found)
        return LeavingBlocks(
            found[0][1].parent,
            [entry.key for _, entry in found],
            [block for block, _ in found],
            [entry.tag for _, entry in found],
            b"".join(entry.engine_hash or entry.key for _, entry in found) if derived else b"",
            _all_of([entry.keep for _, entry in found]),
        )

    def _forget(self, block: int) -> None:
        entry = self._by_block.pop(block, None)
        if entry is not None and self._block_of.get(entry.key) == block:
            del self._block_of[entry.key]


def _all_of(keeps: list[Keep | None]) -> Keep | None:
    """Blocks of one chain may have come with different requests: each must agree to keep them."""
    asked = [keep for keep in dict.fromkeys(keeps) if keep is not None]
    return (lambda since_s: all(keep(since_s) for keep in asked)) if asked else None


def tags_before(
    device: DeviceBlocks | None, scheduled: Iterable[Scheduled], loads: Iterable[LoadPlan]
) -> Callable[[int], Hashable | None]:
    """`DeviceBlocks.tag` before a step; None for blocks that the step or its loads write to.

    An engine names a block's content as soon as it has allocated the block, before the bytes are there.
    """
    written: set[int] = set()
    for entry in scheduled:
        written.update(entry.device_blocks()[entry.written_from :])
    for load in loads:
        written.update(load.device_blocks)
    return lambda block: None if block in written or device is None else device.tag(block)
