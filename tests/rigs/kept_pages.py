"""Pages of a host pool at a manager that serves beside, with a disk tier that completes by hand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from kvbm.client.mirror import Mirror
from kvbm.clock import ManualClock
from kvbm.layout import BlockLayout, Namespace
from kvbm.library import BlockManager
from kvbm.library.attachment import Attachment
from kvbm.manager.space import Space
from kvbm.sglang_integration.host_pages import Pages, pages_of
from kvbm.sglang_integration.pages_kept import PagesKept
from rigs.fake_tier import FakeMedium, FakeTier
from rigs.served import DEADLINE_S, ServedManager
from rigs.sglang_pools import PAGE_TOKENS, HostPool

T = TypeVar("T")

NAMESPACE = Namespace(model="sglang:test", fields=(("pool", "kv"),))
HOST_BLOCKS = 16


def hashes_of(words: str) -> list[str]:
    """Page hashes of a chain: each covers the words up to its own."""
    said = words.split()
    return [hashlib.sha256(" ".join(said[: i + 1]).encode()).hexdigest() for i in range(len(said))]


def run(steps: Generator[None, None, T], meanwhile: Callable[[], object] = lambda: None) -> T:
    """The result of a job that waits; `meanwhile` is called at each wait."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        meanwhile()
        assert time.monotonic() < deadline_s, "the job never ended"


class KeptHouse:
    """A manager, and pools at it. `weights` is what the engine computes with, `clock` the pools' clock."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        disk: bool = False,
        host_blocks: int = HOST_BLOCKS,
    ) -> None:
        self.directory, self.clock = directory, ManualClock(100.0)
        self.weights: bytes | None = b"weights"
        self.weights_coming = False
        self.joined = 0
        self.settings = {"host_blocks": host_blocks, "eviction": "lru"}
        self.medium: FakeMedium | None = None
        self.tier: FakeTier | None = None
        if disk:
            page_bytes = HostPool().page(0).numel() * 4
            layout = BlockLayout(block_tokens=PAGE_TOKENS, shard_bytes=page_bytes)
            self.medium = FakeMedium(layout, 40)
            self.tier = FakeTier(self.medium, pending_limit=40)
            tier = self.tier
            monkeypatch.setattr("kvbm.manager.assembly.open_disk_tier", lambda *args, **options: tier)
            self.settings |= {"disk_bytes": 1 << 20, "disk_dir": str(directory), "disk_admission": "all"}
        self.served: ServedManager | None = None
        self._kept: list[PagesKept] = []
        self.serve()

    def serve(self) -> None:
        """Start the manager."""
        self.served = ServedManager(self.directory, self.settings)

    def pool(self, host_pool: HostPool | None = None, chained: bool = True) -> PagesKept:
        """One more client's pages."""
        return self.pool_of(pages_of(host_pool or HostPool()), chained)

    def pool_of(self, pages: Pages, chained: bool = True) -> PagesKept:
        """One more client's pages, which may be a device's."""
        mirror = Mirror()
        kept = PagesKept(
            NAMESPACE,
            pages,
            lambda: self._join(pages, mirror),
            lambda: self.weights,
            lambda: self.weights,
            lambda: self.weights_coming,
            self.clock,
            mirror,
            chained=chained,
        )
        self._kept.append(kept)
        return kept

    def _join(self, pages: Pages, mirror: Mirror) -> BlockManager:
        self.joined += 1
        layout = BlockLayout(block_tokens=PAGE_TOKENS, shard_bytes=pages.page_bytes)
        attachment = Attachment.at(str(self.directory / "m.sock"))
        return BlockManager.attach(
            attachment, layout, NAMESPACE, join_timeout_s=0.0, reply_timeout_s=DEADLINE_S, mirror=mirror
        )

    def with_space(self, function: Callable[[Space], T]) -> T:
        """Look into the manager's space, or change it."""
        assert self.served is not None
        return self.served.with_space(function)

    def leased(self) -> int:
        """How many blocks are leased."""
        return self.with_space(lambda space: space.host_pool.counts().leased)

    def disk_goes_on(self) -> None:
        """What the disk tier was asked to do by now is done."""
        tier = self.tier
        assert tier is not None
        self.with_space(lambda space: (space.pump(), tier.release(), space.pump()))

    def only_on_disk(self, blocks: int) -> None:
        """Everything that is held goes to disk, and host memory is emptied."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.with_space(lambda space: len(list(space.disk.pool.resident()))) < blocks:  # type: ignore[union-attr]
            self.disk_goes_on()
            assert time.monotonic() < deadline_s
        self.with_space(lambda space: space.clear("host"))

    def stop(self) -> None:
        """The manager goes."""
        if self.served is not None:
            self.served.stop()
            self.served = None

    def close(self) -> None:
        for kept in self._kept:
            kept.close()
        self.stop()
        if self.medium is not None:
            self.medium.close()


def store(kept: PagesKept, hashes: Sequence[str], numbers: Sequence[int]) -> list[bool]:
    """Keep pages; which ones are kept. Time passes while it waits for room."""
    clock = kept._clock
    assert isinstance(clock, ManualClock)
    return run(kept.store(hashes, numbers), lambda: clock.advance(0.05))


def same(pool: HostPool, numbers: Sequence[int], other: HostPool, others: Sequence[int]) -> bool:
    """Whether these pages of two pools hold the same."""
    return all(torch.equal(pool.page(a), other.page(b)) for a, b in zip(numbers, others, strict=True))
