"""What is said of blocks on disk: kept beside them, believed only for its own block, and never worth a block."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.hashing import chain_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.facts_file import FACTS_NAME, FactsFile, fact_bytes
from kvbm.tiers.disk.geometry import plan_geometry
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier

LAYOUT = BlockLayout(block_tokens=16, shard_bytes=4096)
NAMESPACE = Namespace(model="unit/model", fields=(("weights", "aa"),))
KEYS = chain_keys(bytes(32), range(16 * 40), 16)


@pytest.fixture
def facts(tmp_path: Path) -> FactsFile:
    fd = os.open(tmp_path / "facts", os.O_RDWR | os.O_CREAT)
    return FactsFile(Syscalls(), fd, fact_bytes(LAYOUT))


def head(key: BlockKey, text: bytes) -> BlockHead:
    return BlockHead(key, None, facts=text)


def test_what_is_said_is_read_again_for_its_own_block_only(facts: FactsFile) -> None:
    facts.write(3, [head(KEYS[0], b"one"), head(KEYS[1], b""), head(KEYS[2], b"three")])
    assert facts.read(3, KEYS[:3]) == [b"one", b"", b"three"]
    assert facts.read(2, KEYS[:4]) == [b"", b"", b"", b""]
    assert facts.read(100, KEYS[:2]) == [b"", b""], "behind the end of the file"


def test_a_torn_or_flipped_record_says_nothing(facts: FactsFile) -> None:
    facts.write(0, [head(KEYS[0], b"a" * 100), head(KEYS[1], b"b" * 100)])
    os.pwrite(facts.fd, b"x", 60)
    assert facts.read(0, KEYS[:2]) == [b"", b"b" * 100]
    os.ftruncate(facts.fd, fact_bytes(LAYOUT) + 50)
    assert facts.read(0, KEYS[:2]) == [b"", b""]


def test_what_is_too_long_is_not_kept(facts: FactsFile) -> None:
    facts.write(0, [head(KEYS[0], bytes(fact_bytes(LAYOUT))), head(KEYS[1], b"b")])
    assert facts.read(0, KEYS[:2]) == [b"", b"b"]
    assert fact_bytes(LAYOUT) > 36 + 32 + 64 + 150


def opened(
    root: Path, keeps_facts: bool = True, syscalls: Syscalls | None = None, **capacity: Any
) -> DiskTier:
    return open_disk_tier(
        root,
        LAYOUT,
        NAMESPACE,
        **(capacity or {"capacity_blocks": 8}),
        keeps_facts=keeps_facts,
        o_direct=False,
        syscalls=syscalls,
    )


def moved(tier: DiskTier, submit: Callable[[], Outcome]) -> Any:
    assert submit() is Outcome.PENDING
    assert tier.drain(20.0)
    (completion,) = tier.poll()
    return completion


def store(tier: DiskTier, texts: list[bytes]) -> Any:
    blocks = [head(key, text) for key, text in zip(KEYS, texts, strict=False)]
    source = memoryview(bytearray(4096 * len(texts)))
    return moved(tier, lambda: tier.submit_store(1, blocks, SlotIndex(2), [source]))


def load(tier: DiskTier, count: int) -> Any:
    target = memoryview(bytearray(4096 * count))
    return moved(tier, lambda: tier.submit_load(2, KEYS[:count], SlotIndex(2), [target]))


def test_a_tier_gives_back_what_was_said_also_after_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    store(tier, [b"one", b"two"])
    assert [end.facts for end in load(tier, 2).blocks] == [b"one", b"two"]
    tier.close(keep=True)
    tier = opened(tmp_path)
    found = {block.key: block.slot for block in tier.recovered()}
    read = list[list[bytes]]()
    assert tier.read_facts([(found[key], key) for key in KEYS[:2]], read.append)
    assert tier.drain(60.0)
    assert read == [[b"one", b"two"]]
    tier.close(keep=True)
    tier = opened(tmp_path, keeps_facts=False)
    assert len(list(tier.recovered())) == 2
    assert [end.facts for end in load(tier, 2).blocks] == [b"", b""]
    assert tier.path is not None
    assert not (tier.path / FACTS_NAME).exists(), "it would take room that is not counted"
    tier.close(keep=False)


class Failing(Syscalls):
    """A medium on which only the facts cannot be written and read."""

    facts_fd = -1

    def open(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        fd = super().open(path, flags, *arguments, **options)
        if path == FACTS_NAME:
            self.facts_fd = fd
        return fd

    def pwritev(self, fd: int, *arguments: Any) -> int:
        if fd == self.facts_fd:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, *arguments)

    def preadv(self, fd: int, *arguments: Any) -> int:
        if fd == self.facts_fd:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, *arguments)


def test_a_file_of_facts_that_fails_costs_no_block(tmp_path: Path) -> None:
    tier = opened(tmp_path, syscalls=Failing())
    assert store(tier, [b"one", b"two"]).outcome is Outcome.HIT
    ends = load(tier, 2).blocks
    assert [(end.outcome, end.facts) for end in ends] == [(Outcome.HIT, b"")] * 2
    assert not tier.fault
    tier.close(keep=False)


def test_the_file_counts_as_a_part_of_the_capacity(tmp_path: Path) -> None:
    size = 40 * 4096
    plain = plan_geometry(LAYOUT, size, None, 500)
    kept = plan_geometry(LAYOUT, size, None, 500, fact_bytes=fact_bytes(LAYOUT))
    assert 0 < kept.slot_count < plain.slot_count
    assert kept.total_bytes(500) <= size
    tier = opened(tmp_path, capacity_bytes=size)
    store(tier, [b"text"] * 2)
    assert tier.path is not None
    assert sum(file.stat().st_blocks * 512 for file in tier.path.iterdir()) <= size
    tier.close(keep=False)
