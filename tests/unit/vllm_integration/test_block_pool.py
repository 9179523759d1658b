"""How much of a request is on the device, by a few looks into vLLM's prefix cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.vllm_integration.block_pool import PoolBlocks


class Pool:
    """vLLM's pool with these hashes in its prefix cache; counts the looks."""

    def __init__(self, cached: set[int]) -> None:
        self._cached = cached
        self.cached_block_hash_to_block: object = object()
        self.looks = 0

    def get_cached_block(self, block_hash: int, group_ids: list[int]) -> list[object] | None:
        assert group_ids == [0]
        self.looks += 1
        return [object()] if block_hash in self._cached else None


def blocks_over(pool: Pool) -> PoolBlocks:
    blocks = PoolBlocks()
    blocks.pool = pool
    return blocks


@given(count=st.integers(0, 300), share=st.floats(0.0, 1.0))
def test_the_number_of_leading_blocks_is_exact_where_a_chain_lost_its_end(count: int, share: float) -> None:
    held = round(count * share)
    assert blocks_over(Pool(set(range(held)))).on_device(range(count)) == held


@given(count=st.integers(0, 100), cached=st.sets(st.integers(0, 100)))
def test_any_cache_gives_a_hint_within_the_request(count: int, cached: set[int]) -> None:
    """With a hole in a chain it may be too large, but it always ends where a block is there and the next is not."""
    hint = blocks_over(Pool(cached)).on_device(range(count))
    assert 0 <= hint <= count
    assert hint == 0 or hint - 1 in cached
    assert hint == count or hint not in cached


def test_thousands_of_blocks_take_a_few_looks() -> None:
    for held in (0, 1, 17, 4096, 5000, 8191, 8192):
        pool = Pool(set(range(held)))
        assert blocks_over(pool).on_device(range(8192)) == held
        assert pool.looks <= 27


def test_before_the_pool_is_bound_nothing_is_known() -> None:
    assert PoolBlocks().on_device(range(5)) == 0


def test_pinned_blocks_stay_found_and_go_last_block_first() -> None:
    """In vLLM's own pool: what is pinned when its request ends is not handed out, and is found meanwhile."""
    block_pool = pytest.importorskip("vllm.v1.core.block_pool", reason="vLLM is not installed")
    pool = block_pool.BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=16)
    ours = PoolBlocks()
    assert (ours.block_count, ours.pin([1])) == (0, False)
    ours.pool = pool
    assert ours.block_count == 6
    chain = pool.get_new_blocks(3)
    request = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(3)])
    pool.cache_full_blocks(request, chain, 0, 3, block_size=16, kv_cache_group_id=0)
    numbers = [block.block_id for block in chain]
    assert ours.pin(numbers)
    pool.free_blocks(reversed(chain))
    assert pool.get_num_free_blocks() == 2
    others = pool.get_new_blocks(2)
    assert not {block.block_id for block in others} & set(numbers)
    assert ours.on_device(request.block_hashes) == 3
    hit = pool.get_cached_block(request.block_hashes[0], [0])
    assert hit == [chain[0]]
    pool.touch(hit)
    ours.unpin(numbers)
    assert pool.get_num_free_blocks() == 2, "the hit keeps its block"
    pool.free_blocks(hit)
    assert [block.block_id for block in pool.get_new_blocks(2)] == [numbers[2], numbers[1]]
    assert ours.on_device(request.block_hashes) == 1
