"""Pages of host pools: the same bytes in every layout, and a pool that lies otherwise passes through a buffer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="pages are torch tensors; torch is not installed")

import torch

from kvbm.errors import KvbmError
from kvbm.sglang_integration.host_pages import STAGED_PAGES, MappedPages, StagedPages, pages_of
from rigs.sglang_pools import LAYOUTS, PAGE_TOKENS, PAGES, HostPool, indices_of

PIECES = {"layer_first": 3, "page_first": 1, "page_first_direct": 1, "page_head": 1, "page_first_kv_split": 1}


def bytes_of(cache: dict[str, torch.Tensor], block: int) -> bytes:
    return b"".join(bytes(tensor[block].numpy()) for tensor in cache.values())


def in_slot_order(pool: HostPool, number: int) -> bytes:
    """A page's bytes, piece after piece, by the pool's own account."""
    addresses, sizes = pool.get_page_buffer_meta(indices_of([number]))
    import ctypes

    return b"".join(ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True))


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_where_the_pool_says_in_every_layout(layout: str, mla: bool) -> None:
    pool = HostPool(layout, mla)
    pages = pages_of(pool)
    assert isinstance(pages, MappedPages)
    assert len(pages.cache) == PIECES[layout] * (1 if mla else 2)
    assert pages.page_bytes == pool.page(0).numel() * 4
    for number in range(PAGES):
        assert bytes_of(pages.cache, number) == in_slot_order(pool, number)
    others = [pool.page(number) for number in range(PAGES)]
    (blocks,) = ([block] for block in pages.take([5]))
    for tensor in pages.cache.values():
        tensor[blocks[0]] = tensor[2]
    assert torch.equal(pool.page(5), others[2])
    assert all(torch.equal(pool.page(n), others[n]) for n in range(PAGES) if n != 5)


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_small_pools_are_mapped_too(pages: int) -> None:
    pool = HostPool("layer_first", pages=pages)
    mapped = pages_of(pool)
    assert isinstance(mapped, MappedPages)
    assert bytes_of(mapped.cache, pages - 1) == in_slot_order(pool, pages - 1)


def test_pieces_that_lie_side_by_side_are_views_of_one_storage() -> None:
    cache = pages_of(HostPool("layer_first")).cache
    assert len({tensor.untyped_storage().data_ptr() for tensor in cache.values()}) == 1


class Odd(HostPool):
    """Says something else about its pages than a pool would."""

    def __init__(self, change: str) -> None:
        super().__init__("page_first")
        self.change = change

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses, sizes = super().get_page_buffer_meta(indices)
        if self.change == "the last page lies elsewhere":
            addresses[-1] += 64
        elif self.change == "pages overlap":
            addresses = [addresses[0] + 8 * i for i in range(len(addresses))]
        elif self.change == "sizes differ":
            sizes[-1] -= 4
        elif self.change == "no pieces":
            return [], []
        elif self.change == "a piece too few":
            return addresses[:-1], sizes[:-1]
        elif self.change == "sizes are missing":
            sizes = sizes[:2]
        elif self.change == "a layout that it does not know":
            raise ValueError("unsupported layout")
        return addresses, sizes


@pytest.mark.parametrize(
    "change",
    [
        "the last page lies elsewhere",
        "pages overlap",
        "sizes differ",
        "no pieces",
        "a piece too few",
        "sizes are missing",
        "a layout that it does not know",
    ],
)
def test_a_pool_whose_pages_lie_oddly_passes_through_a_buffer(change: str) -> None:
    assert isinstance(pages_of(Odd("")), MappedPages)
    assert isinstance(pages_of(Odd(change)), StagedPages)


def test_flat_pages_pass_through_a_buffer() -> None:
    pool = HostPool(zero_copy=False)
    pages = pages_of(pool)
    assert isinstance(pages, StagedPages)
    assert (pages.batch, pages.page_bytes) == (STAGED_PAGES, pool.page(0).numel() * 4)
    before = [pool.page(number) for number in range(PAGES)]
    rows = pages.put([7, 2, 9])
    assert rows == [0, 1, 2]
    assert [
        torch.equal(pages.flat(row).view(before[0].shape), before[n])
        for row, n in zip(rows, [7, 2, 9], strict=True)
    ] == [True] * 3
    assert pages.take([0, 1]) == [0, 1]
    pages.taken([0, 1])
    assert torch.equal(pool.page(0), before[7])
    assert torch.equal(pool.page(1), before[2])
    assert torch.equal(pool.page(2), before[2])


@pytest.mark.parametrize("zero_copy", [True, False])
def test_only_whole_pages_of_the_pool_have_numbers(zero_copy: bool) -> None:
    pages: Any = pages_of(HostPool(zero_copy=zero_copy))
    assert pages.numbers(indices_of([3, 0, PAGES - 1])) == [3, 0, PAGES - 1]
    assert pages.numbers(indices_of([])) == []
    for wrong in (
        indices_of([3])[:-1],
        indices_of([3]) + 1,
        indices_of([PAGES]),
        indices_of([0]) - PAGE_TOKENS,
    ):
        with pytest.raises(KvbmError, match="indices"):
            pages.numbers(wrong)
