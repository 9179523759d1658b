"""A program at a shared manager whose host memory changes its size: right bytes, or none, and no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import torch

from kvbm.admin_protocol import Resize, Resized
from kvbm.client.admin import Admin
from kvbm.settings import Settings
from rigs.library import BLOCK_TOKENS, SHARD_BYTES, SharedHouse, content, new_cache

TOKENS = list(range(6 * BLOCK_TOKENS))
BLOCKS = list(range(6))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[SharedHouse]:
    house = SharedHouse(tmp_path)
    yield house
    house.close()


def resize(house: SharedHouse, blocks: int) -> Resized:
    assert house.served is not None
    slot_bytes = house.with_space(lambda space: space.layout.block_bytes)
    assert slot_bytes >= SHARD_BYTES
    with Admin(house.served.path, Settings()) as admin:
        reply = admin.ask(Resize(host_bytes=blocks * slot_bytes), Resized)
    assert not reply.refusal
    house.with_space(lambda space: None)  # the turn in which it answered has ended, and sessions with it
    return reply


@pytest.mark.parametrize("blocks", [8, 4000])
def test_a_program_goes_on_with_memory_of_another_size(house: SharedHouse, blocks: int) -> None:
    program = house.open()
    cache, target = new_cache(1), new_cache(2)
    assert program.offload(TOKENS, cache, BLOCKS) == 6
    assert resize(house, blocks).carried == 6
    with program.match(TOKENS) as hit:
        assert hit.onboard(target, BLOCKS) == 6
    assert torch.equal(content(target, BLOCKS), content(cache, BLOCKS))
    others = [token + 1 for token in TOKENS]
    assert program.offload(others, cache, BLOCKS) == 6
    program.close()


def test_a_match_that_was_made_before_brings_right_bytes_or_none(house: SharedHouse) -> None:
    program = house.open()
    cache, target = new_cache(1), new_cache(2)
    program.offload(TOKENS, cache, BLOCKS)
    with program.match(TOKENS) as hit:
        resize(house, 4000)
        arrived = hit.onboard(target, BLOCKS)
    assert torch.equal(content(target, BLOCKS[:arrived]), content(cache, BLOCKS[:arrived]))
    assert torch.equal(content(target, BLOCKS[arrived:]), content(new_cache(2), BLOCKS[arrived:]))
    program.close()
