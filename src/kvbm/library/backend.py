"""Where the blocks of a `BlockManager` are kept: in this process (`local`), or at a shared manager (`remote`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvbm.block import BlockKey
from kvbm.hashing import EngineKeys
from kvbm.hints import UNHINTED, ClientHint, Verdict

if TYPE_CHECKING:
    import torch

    from kvbm.library.layer_load import LayerLoad


class Stored(IntEnum):
    """What became of a block that was to be kept."""

    COPIED = 0
    HELD = 1
    """It is kept already, or another client is storing it."""
    REFUSED = 2
    """There is no room, no manager, or its prefix is not kept."""


class Run(Protocol):
    """Blocks in a row that a lookup found. They are leased until they are released. Those that are not loaded by then
    are `left_because` of one of `protocol.UNLOADED_REASONS`."""

    left_because: str

    @property
    def sources(self) -> bytes:
        """The tier that each block was found in (see `block.Tier`), a byte each; fewer once a block has failed."""

    @property
    def boundary(self) -> int:
        """With several groups: how many blocks of the prompt it stands for, from its first one on; else 0."""


class Looked(NamedTuple):
    """What was found, and what became there of parts of the hint that came with the question."""

    run: Run | None = None
    verdicts: tuple[Verdict, ...] = ()


class Backend(Protocol):
    """Finds, copies and keeps blocks. Every call copies in the calling thread, which owns the backend."""

    def lookup(
        self,
        keys: list[BlockKey],
        skip: int,
        told: EngineKeys | None = None,
        asker: ClientHint = UNHINTED,
    ) -> Looked:
        """Lease the longest run from `keys[skip]` on; no run where nothing is found. `told` goes along for people, and
        `asker` for policies."""

    def descriptors(self) -> tuple[int, ...]:
        """What becomes readable when there is something to take in (see `refresh`)."""

    def refresh(self) -> None:
        """Take in what has arrived, and join a manager that came back."""

    stays: int
    """While this is not 0, another manager is not joined in place of one that has gone: its memory is being read."""

    def ready(self, run: Run) -> tuple[int, bool]:
        """How many leading blocks of the run can be copied without waiting, and whether more will follow."""

    def load(
        self, run: Run, kv_cache: Mapping[str, torch.Tensor], device_blocks: Sequence[int], first: int = 0
    ) -> int:
        """Copy the run's blocks from the position `first` on into these device blocks; how many leading ones hold their
        bytes now."""

    def load_by_layer(
        self, wanted: Sequence[tuple[Run, Sequence[int]]], kv_cache: Mapping[str, torch.Tensor]
    ) -> LayerLoad | None:
        """A load of each run's first blocks into these device blocks, layer by layer; None where they are not all in
        host memory."""

    def release(self, run: Run) -> None:
        """The lease ends."""

    def finished(self, key: BlockKey) -> None:
        """The request whose prompt ended with this key has ended: what its client said counts from now on."""

    def store(
        self,
        keys: list[BlockKey],
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int],
        parent: BlockKey | None = None,
        groups: bytes = b"",
        tenant: str = "",
    ) -> list[Stored]:
        """Keep these blocks, a chain behind `parent`, as far as they are not held yet; what became of each.

        `groups` has the group of each, a byte; empty where there is one. `tenant` is as in `Reserve`.
        """

    def flush(self, timeout_s: float) -> bool:
        """Wait until no block is on its way to disk or a store; False after `timeout_s`."""

    def clear(self, tier: str) -> int:
        """Drop the blocks that are not in use, of one tier or of all; how many."""

    def status(self) -> dict[str, object]:
        """The size and the use of each tier."""

    def close(self) -> None:
        """Release everything."""
