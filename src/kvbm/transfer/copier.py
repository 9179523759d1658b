"""The promises of every copier, and the functions that all of them need: the arena as a tensor, pairs as runs."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from kvbm.errors import KvbmError
from kvbm.transfer.device_cache import DeviceCache

COPY_S_MAX = 120.0
"""A copy hangs if it has not ended so long after it was begun, or after the end of the copy before it.

In front of it is at most the engine's work up to its mark: a step of 128,000 tokens takes up to a minute on one card.
A copy itself is of a few GB at most, in half a minute even at 0.1 GB/s. vLLM gives a step 300 s."""

Pairs: TypeAlias = Sequence[tuple[int, int]]
"""(device block, slot) of each copy; no block and no slot twice."""


class DeviceEvent(Protocol):
    """A point in the engine's device work; opaque to everyone but the copier that made it."""

    def synchronize(self) -> None:
        """Block until the device has got there."""


class Copying(Protocol):
    """Copies that were begun. On an error any of their targets may hold anything."""

    def done(self) -> bool:
        """Whether all bytes have arrived; never blocks. Raises KvbmError or RuntimeError when copying failed."""

    def wait(self) -> None:
        """Block until `done`; other threads run meanwhile. Raises as `done` does, and CopyHung after `COPY_S_MAX`: of
        the errors this alone leaves something under way."""


class Over:
    """Copies that ended before anybody could ask (see `Copying`)."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class Copier(Protocol):
    """Moves whole blocks between the engine's device memory (G1) and the host arena (G2), in one worker.

    Copies are begun by one thread at a time. They touch the first `shard_bytes` of the slots named and the device
    blocks named, nothing else.
    """

    def adopt_thread(self) -> None:
        """Called once by a thread of ours that begins copies, before it does: never by the engine's."""

    def mark(self) -> DeviceEvent | None:
        """The present end of the engine's work, for `after`. Called by the engine's thread; never blocks."""

    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> Copying:
        """Begin to copy device blocks into slots. Once over, slots hold the bytes and blocks may be overwritten.

        The caller must pass `after`, the mark set behind the work that wrote the blocks, unless that work is
        done or lies on the calling thread's own stream. Raises `KvbmError` for a block or slot out of range; after
        any error nothing is under way.
        """

    def begin_load(self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None) -> Copying:
        """Begin to copy slots into device blocks, of one layer or of all. Once over, any stream may read them.

        The slots hold their content by now: a store into one of them is over. The caller must pass `after`, a mark
        behind all work that still uses the blocks' former content, under the same exceptions as for `begin_store`.
        Raises as `begin_store` does.
        """

    def hold(self, copying: Copying) -> None:
        """The device begins the engine's later work only after `copying`. Called by the engine's thread."""

    def store(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        """`begin_store`, and wait."""

    def load(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        """`begin_load`, and wait."""

    def close(self) -> None:
        """Wait for copies under way and give threads and page locks back. Idempotent."""


class Run(NamedTuple):
    """Pairs (block, slot), (block + 1, slot + 1), … `length` of them, which one strided copy can move."""

    block: int
    slot: int
    length: int


def runs(pairs: Pairs) -> Iterator[Run]:
    """Cut pairs, sorted by block, into the longest runs."""
    start, length = (-1, -1), 0
    for block, slot in pairs:
        if length and (block, slot) == (start[0] + length, start[1] + length):
            length += 1
            continue
        if length:
            yield Run(*start, length)
        start, length = (block, slot), 1
    if length:
        yield Run(*start, length)


def checked(pairs: Pairs, cache: DeviceCache, arena: torch.Tensor) -> list[tuple[int, int]]:
    """The pairs, sorted by block; `KvbmError` for one that lies outside the cache or the arena.

    Checked always and not by assertion: pairs come from another process, and a wrong one overwrites a
    block that another request is reading.
    """
    for block, slot in pairs:
        if not (0 <= block < cache.block_count and 0 <= slot < arena.shape[0]):
            raise KvbmError(
                f"copying block {block} and slot {slot}: accepted are blocks 0 to {cache.block_count - 1} "
                f"and slots 0 to {arena.shape[0] - 1}"
            )
    ordered = sorted(pairs)
    assert len({block for block, _ in ordered}) == len({slot for _, slot in ordered}) == len(ordered), pairs
    return ordered


def assert_arena(arena: torch.Tensor, cache: DeviceCache) -> None:
    """`arena` must be uint8 `[slots, slot_bytes]`, dense rows, each with room for a block of `cache`."""
    assert arena.dtype == torch.uint8, arena.dtype
    assert arena.dim() == 2, arena.shape
    assert arena.stride(1) == 1, arena.stride()
    assert arena.shape[1] >= cache.shard_bytes, (arena.shape, cache.shard_bytes)


def arena_tensor(memory: mmap.mmap, slot_count: int, slot_bytes: int) -> torch.Tensor:
    """`memory` as a uint8 tensor `[slot_count, slot_bytes]` on the CPU; nothing is copied.

    `memory` must be writable and hold that many bytes. It cannot be closed while the tensor lives.
    """
    assert min(slot_count, slot_bytes) > 0, (slot_count, slot_bytes)
    assert len(memory) >= slot_count * slot_bytes, (len(memory), slot_count, slot_bytes)
    # An inference tensor could not be written from a thread outside of inference mode.
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8, count=slot_count * slot_bytes).view(
            slot_count, slot_bytes
        )
