"""The copies between SGLang's device pool and its host pool, for two pools that lie in the memory of one CPU.

Every byte is moved once, by `memmove`, in pieces as long as both sides are contiguous. They stand where SGLang imports
CUDA kernels, with the names, arguments and meaning of those; `benchmarks/sglang_copies.py` measures them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

Tensor = Any
_move = ctypes.memmove


def runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, count) of the longest stretches that are consecutive on both sides."""
    start = 0
    for position in range(1, len(source) + 1):
        if (
            position == len(source)
            or source[position] != source[position - 1] + 1
            or target[position] != target[position - 1] + 1
        ):
            yield source[start], target[start], position - start
            start = position


def _pages(indices: Tensor, page_size: int) -> list[int]:
    """The pages of token indices, which come in whole pages."""
    pages: list[int] = (indices[::page_size] // page_size).tolist()
    return pages


def _row_bytes(tensor: Tensor) -> int:
    assert tensor[0].is_contiguous(), "a token's row lies in one piece"
    count: int = tensor.stride(0) * tensor.element_size()
    return count


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Tokens of each source layer, `[tokens, …]`, to those of the target layer at the same place in the list."""
    found = list(runs(_pages(src_indices, page_size), _pages(dst_indices, page_size)))
    for source, target in zip(src_layers, dst_layers, strict=True):
        assert source.dtype == target.dtype
        page = _row_bytes(source) * page_size
        assert page == _row_bytes(target) * page_size
        source_at, target_at = source.data_ptr(), target.data_ptr()
        for first, to, count in found:
            _move(target_at + to * page, source_at + first * page, count * page)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of host pools `[pages, layers, page_size, …]` to that layer's device pools `[tokens, …]`."""
    pairs = list(zip(_pages(src_indices, page_size), _pages(dst_indices, page_size), strict=True))
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        page = _row_bytes(device) * page_size
        stride = _row_bytes(host)
        assert stride == page * host.shape[1]
        host_at, device_at = host.data_ptr() + layer_id * page, device.data_ptr()
        for source, target in pairs:
            _move(device_at + target * page, host_at + source * stride, page)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Device pools `[tokens, …]`, all layers of K and then all of V, to host pools `[pages, layers, page_size, …]`."""
    pairs = list(zip(_pages(src_indices, page_size), _pages(dst_indices, page_size), strict=True))
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, device in enumerate(src_ptrs):
        host, layer = dst_ptrs[number // layers], number % layers
        page = _row_bytes(device) * page_size
        stride = _row_bytes(host)
        assert stride == page * layers
        host_at, device_at = host.data_ptr() + layer * page, device.data_ptr()
        for source, target in pairs:
            _move(host_at + target * stride, device_at + source * page, page)


COPIES = (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf)
