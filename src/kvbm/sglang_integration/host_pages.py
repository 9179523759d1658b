"""Pages of SGLang's host pools as blocks of a KV cache.

A pool says where the pieces of a page lie (`get_page_buffer_meta`, its own interface for zero copy). They are views of
the pool's memory here, so that a page is copied to and from a slot without a stop in between, in every layout. A pool
that does not say so gives and takes flat pages, which pass through a buffer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kvbm.errors import KvbmError

log = logging.getLogger("kvbm.sglang")

STAGED_PAGES = 32
"""Flat pages that pass through the buffer at once."""


class _Piece(NamedTuple):
    """A piece of every page: it begins at `address + page * stride` and has `size` bytes."""

    address: int
    stride: int
    size: int

    def end(self, pages: int) -> int:
        return self.address + (pages - 1) * self.stride + self.size


class Pages(Protocol):
    """Pages of a pool, by number. `cache` is the KV cache that copies go to and from, `batch` how many at most."""

    cache: dict[str, torch.Tensor]
    page_bytes: int
    batch: int

    def numbers(self, indices: torch.Tensor) -> list[int]:
        """The pages that these token indices are of, `[pages * page_size]` in order. Raises KvbmError for others."""

    def put(self, numbers: Sequence[int]) -> list[int]:
        """These pages are about to be kept: the blocks of `cache` that hold them now."""

    def take(self, numbers: Sequence[int]) -> list[int]:
        """The blocks of `cache` that these pages are to be loaded into."""

    def taken(self, numbers: Sequence[int]) -> None:
        """The blocks that `take` gave for these pages hold their bytes."""


def pages_of(pool: Any) -> Pages:
    """The pages of a host pool, without a stop in between where the pool allows it."""
    try:
        return MappedPages(pool)
    except (AttributeError, NotImplementedError, ValueError, KvbmError) as error:
        log.info("pages of %s pass through a buffer: %s", type(pool).__name__, error)
        return StagedPages(pool)


class NumberedPages:
    """Pages by number, for pools whose page i has the tokens from i * page_tokens on."""

    def __init__(self, page_tokens: int, count: int) -> None:
        self.page_tokens, self.count = page_tokens, count

    def numbers(self, indices: torch.Tensor) -> list[int]:
        """The pages that these token indices are of. Raises KvbmError for others."""
        if len(indices) % self.page_tokens:
            raise KvbmError(
                f"indices of {len(indices)} tokens: accepted are whole pages of {self.page_tokens}"
            )
        first = indices[:: self.page_tokens].tolist()
        numbers = [index // self.page_tokens for index in first]
        if any(
            n * self.page_tokens != i or not 0 <= n < self.count for n, i in zip(numbers, first, strict=True)
        ):
            raise KvbmError(f"indices {first[:4]}…: accepted are beginnings of the pool's {self.count} pages")
        return numbers


class PagesInPlace(NumberedPages):
    """Pages whose own memory is copied: the blocks of the cache are the pages."""

    def put(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def take(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def taken(self, numbers: Sequence[int]) -> None:
        """They lie where they belong."""


class MappedPages(PagesInPlace):
    """Views of the pool's own memory."""

    def __init__(self, pool: Any) -> None:
        super().__init__(int(pool.page_size), int(pool.size) // int(pool.page_size))
        self.pool = pool  # it keeps its memory alive
        pieces = _pieces(pool, self.count, self.page_tokens)
        self.cache = _views(pieces, self.count)
        self.page_bytes = sum(piece.size for piece in pieces)
        self.batch = self.count


class StagedPages(NumberedPages):
    """A buffer of flat pages, which the pool fills and reads."""

    def __init__(self, pool: Any) -> None:
        super().__init__(int(pool.page_size), int(pool.size) // int(pool.page_size))
        self.pool = pool
        sample = pool.get_dummy_flat_data_page()
        self._shape, self._dtype = sample.shape, sample.dtype
        self.page_bytes = sample.numel() * sample.element_size()
        self._buffer = torch.empty(STAGED_PAGES, self.page_bytes, dtype=torch.uint8)
        self.cache = {"page": self._buffer}
        self.batch = STAGED_PAGES

    def put(self, numbers: Sequence[int]) -> list[int]:
        for row, number in enumerate(numbers):
            self.fill(row, self.pool.get_data_page(number * self.page_tokens))
        return list(range(len(numbers)))

    def take(self, numbers: Sequence[int]) -> list[int]:
        return list(range(len(numbers)))

    def taken(self, numbers: Sequence[int]) -> None:
        for row, number in enumerate(numbers):
            self.pool.set_from_flat_data_page(number * self.page_tokens, self.flat(row))

    def fill(self, row: int, page: torch.Tensor) -> None:
        """Copy a flat page into the buffer."""
        self._buffer[row].copy_(page.detach().reshape(-1).view(torch.uint8))

    def flat(self, row: int) -> torch.Tensor:
        """A row of the buffer as a flat page: a view."""
        return self._buffer[row].view(self._dtype).view(self._shape)


def _pieces(pool: Any, pages: int, page_tokens: int) -> list[_Piece]:
    """The pieces of a page, by the pool's own account of its first two pages and its last."""
    looked_at = sorted({0, min(1, pages - 1), pages - 1})
    indices = torch.cat([torch.arange(n * page_tokens, (n + 1) * page_tokens) for n in looked_at])
    addresses, sizes = pool.get_page_buffer_meta(indices)
    if not addresses or len(addresses) % len(looked_at) or len(addresses) != len(sizes):
        raise KvbmError(f"{len(addresses)} pieces for {len(looked_at)} pages")
    each = len(addresses) // len(looked_at)
    pieces = []
    for position in range(each):
        found = [int(address) for address in addresses[position::each]]
        size = int(sizes[position])
        stride = found[1] - found[0] if len(found) > 1 else size
        if (
            stride < size
            or found[-1] != found[0] + looked_at[-1] * stride
            or {*sizes[position::each]} != {size}
        ):
            raise KvbmError("its pages do not lie at equal distances")
        pieces.append(_Piece(found[0], stride, size))
    return pieces


def _views(pieces: Sequence[_Piece], pages: int) -> dict[str, torch.Tensor]:
    """A tensor `[pages, bytes]` of each piece, in order. Pieces that lie side by side share a storage: then several
    of them can be copied as one."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted((piece.address, piece.end(pages)) for piece in pieces):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    bases = {begin: _memory(begin, end - begin) for begin, end in spans}
    views = {}
    for number, piece in enumerate(pieces):
        begin = max(start for start in bases if start <= piece.address)
        offset = piece.address - begin
        views[f"piece.{number}"] = bases[begin].as_strided((pages, piece.size), (piece.stride, 1), offset)
    return views


def _memory(address: int, size: int) -> torch.Tensor:
    """The pool's memory as bytes; the pool keeps it alive."""
    with torch.inference_mode(False):
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
