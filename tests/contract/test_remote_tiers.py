"""The public contract of remote tiers, on the tier over blobs and on the double."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.remote_contract import RemoteContract
from kvbm.tiers.remote.blob_tier import BlobTier, open_blob_tier
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.contract import RemoteTier
from kvbm.tiers.remote.drivers.directory import DirectoryBlobs
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.sealing import MasterKey, Seal, Sealer
from rigs.fake_remote import FakeRemote, FakeStore
from rigs.faulty_blobs import BlobFault, BlobRule, FaultyBlobs, MemoryBlobs


class KeptOpen(MemoryBlobs):
    """Nodes share it: one that closes takes it from no other."""

    def close(self) -> None:
        pass


class TestOverMemory(RemoteContract):
    seal: Seal | None = None

    @pytest.fixture(autouse=True)
    def shared(self) -> None:
        self.blobs = KeptOpen(time.time)

    def store(self, tmp_path: Path) -> BlobStore:
        return self.blobs

    def make_remote(
        self, tmp_path: Path, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> BlobTier:
        options = RemoteOptions(
            pending_limit=pending_limit,
            store_threads=2,
            load_deadline_s=20.0,
            poll_s=0.05,
            poll_max_s=0.1,
            collect=False,
        )
        blobs = self.store(tmp_path)
        return open_blob_tier(blobs, layout, namespace, options, jitter=random.Random(), seal=self.seal)


class TestOverMemoryOneShard(TestOverMemory):
    layout = BlockLayout(block_tokens=64, shard_bytes=4096, shard_count=1)


class TestOverMemoryLargeBlocks(TestOverMemory):
    """A block is larger than a load of many would be: one for each load."""

    layout = BlockLayout(block_tokens=64, shard_bytes=9 << 20, shard_count=1)


class TestOverMemorySealed(TestOverMemory):
    @pytest.fixture(autouse=True)
    def sealed(self, shared: None) -> None:
        pytest.importorskip("cryptography")
        self.seal = Sealer([MasterKey("a", bytes(range(32)))])


class TestOverDirectory(TestOverMemory):
    def store(self, tmp_path: Path) -> BlobStore:
        return DirectoryBlobs(tmp_path, time.monotonic)


class TestOverFaultyStore(TestOverMemory):
    """Each first request of its kind fails, and some are slow: what is promised is kept all the same."""

    def store(self, tmp_path: Path) -> BlobStore:
        return FaultyBlobs(
            self.blobs,
            BlobRule(fault=BlobFault.DELAYED, seconds=0.002, chance=0.3),
            BlobRule(fault=BlobFault.THROTTLED, operation="listing", times=1),
            BlobRule(fault=BlobFault.UNSURE, operation="put", name="log/", times=1),
            BlobRule(fault=BlobFault.FAILED, operation="touch"),
            BlobRule(fault=BlobFault.FAILED, name="probe/", times=1),
            seed=1,
        )


class TestFakeRemote(RemoteContract):
    """Its nodes learn of all there is with each tick."""

    @pytest.fixture(autouse=True)
    def shared(self) -> None:
        self.stores: dict[bytes, FakeStore] = {}

    def make_remote(
        self, tmp_path: Path, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> RemoteTier:
        store = self.stores.setdefault(namespace.fingerprint, FakeStore(layout))
        return _Learning(store, pending_limit, by_hand=False)


class _Learning(FakeRemote):
    def tick(self) -> None:
        super().tick()
        self.learn([key for key in self.store.blocks if self.places([key]) == [-1]])
