"""The public tier contract, run on `FakeTier`, the test double that keeps its blocks in RAM (not our host tier)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.tier_contract import PersistentTierContract
from rigs.fake_tier import FakeMedium, FakeTier


class TestFakeTier(PersistentTierContract):
    """All media of one test stay until its end: a tier made again is what comes after a restart."""

    run_blocks_max = 4

    @pytest.fixture(autouse=True)
    def media(self) -> Iterator[None]:
        self._media: dict[tuple[Path, bytes], FakeMedium] = {}
        yield
        for medium in self._media.values():
            medium.close()

    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> FakeTier:
        place = (tmp_path, namespace.fingerprint)
        if place not in self._media:
            self._media[place] = FakeMedium(layout, slot_count)
        return FakeTier(self._media[place], pending_limit, False, self.run_blocks_max)


class TestFakeTierOneShard(TestFakeTier):
    layout = BlockLayout(block_tokens=64, shard_bytes=4096, shard_count=1)


class TestFakeTierOfSingleBlocks(TestFakeTier):
    run_blocks_max = 1
