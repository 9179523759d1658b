"""Pages of device pools: rows of every layer where they lie, and which layer reads which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="pages are torch tensors; torch is not installed")

import torch

from kvbm.errors import KvbmError
from kvbm.sglang_integration.device_pages import DevicePages

PAGE, ROWS = 4, 22
"""Two rows are no whole page: SGLang has a page more or less than a multiple."""


def entry(
    rows_are_pages: bool = False, mapping: dict[int, Any] | None = None, **others: Any
) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(1)
    groups = [[torch.randn(ROWS, 2, 8, generator=generator) for _ in range(2)] for _ in range(2)]
    facts = {"page_size": PAGE, "_row_span": 1 if rows_are_pages else PAGE, "components": groups}
    return SimpleNamespace(**{**facts, "layer_mapping": mapping or {0: 0, 1: 1}, **others})


def test_a_page_is_its_rows_of_every_component_and_writes_go_there() -> None:
    pool = entry()
    pages = DevicePages(pool, 2)
    assert (pages.count, pages.batch, pages.page_bytes) == (5, 5, 4 * PAGE * 2 * 8 * 4)
    assert list(pages.cache) == ["0.0", "0.1", "1.0", "1.1"]
    for number, group in enumerate(pool.components):
        for index, buffer in enumerate(group):
            assert torch.equal(pages.cache[f"{number}.{index}"][3], buffer[3 * PAGE : 4 * PAGE])
    pages.cache["1.0"][2] = 7.0
    assert (pool.components[1][0][2 * PAGE : 3 * PAGE] == 7.0).all()
    assert pages.put([3, 1]) == pages.take([3, 1]) == [3, 1]


def test_each_layer_reads_its_own_tensors_or_several_or_none() -> None:
    assert DevicePages(entry(), 2).layers == [["0.0", "1.0"], ["0.1", "1.1"]]
    hybrid = DevicePages(entry(mapping={1: 0, 3: (0, 1)}), 4)
    assert hybrid.layers == [[], ["0.0", "1.0"], [], ["0.0", "0.1", "1.0", "1.1"]]


def test_a_row_may_be_a_page() -> None:
    pages = DevicePages(entry(rows_are_pages=True), 2)
    assert pages.count == ROWS
    assert pages.cache["0.1"].shape == (ROWS, 1, 2, 8)
    assert pages.numbers(torch.arange(8, 16)) == [2, 3]


def test_only_beginnings_of_the_pools_pages_have_numbers() -> None:
    pages = DevicePages(entry(), 2)
    assert pages.numbers(torch.tensor([12, 13, 14, 15, 0, 1, 2, 3])) == [3, 0]
    assert pages.numbers(torch.tensor([], dtype=torch.int64)) == []
    for wrong in ([0, 1, 2], [1, 2, 3, 4], [20, 21, 22, 23], [-4, -3, -2, -1]):
        with pytest.raises(KvbmError, match="indices"):
            pages.numbers(torch.tensor(wrong))
