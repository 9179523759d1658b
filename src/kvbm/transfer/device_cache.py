"""The device side of a copy: where each block's bytes lie in the KV tensors that an engine registered.

An engine hands over one tensor per layer, each a *logical* view whose strides say how memory is really laid
out. Here every view becomes a *region*: a strided view `[block, ..., run]` of plain words, in which one block
of one layer (or of a stack of layers) is the slice `[block]`. A copier needs nothing else.

In the host slot the same words lie densely: layers in the order registered, inside a layer in the order of
device memory. So the slot's bytes depend on what `DeviceCache.description` says and on nothing else: not on
the number of blocks, the padding between them, or whether layers share an allocation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from kvbm.errors import KvbmError

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
"""Words that copies are made of, widest first. Only their width matters: no value is ever looked at."""


_OVERLAY = "="
"""Between the names of layers that are kept once."""


class Axis(NamedTuple):
    """One axis of a strided view: `size` steps of `stride_bytes`."""

    size: int
    stride_bytes: int


class Region(NamedTuple):
    """One strided set of bytes per block: a layer, or several layers at a constant distance.

    `device` is a view `[block, *shape]` of words on the device, with the engine's memory beneath it;
    the block's words lie densely from `slot_offset_bytes` of the slot on, in C order of `shape`.
    """

    device: torch.Tensor
    slot_offset_bytes: int
    bytes_per_block: int

    def slots(self, arena: torch.Tensor) -> torch.Tensor:
        """The same region of every slot of `arena` (uint8 `[slots, slot_bytes]`): words `[slot, *shape]`."""
        word = self.device.element_size()
        slot_stride, base = arena.stride(0), arena.storage_offset() + self.slot_offset_bytes
        assert slot_stride % word == base % word == 0, (slot_stride, base, word)
        strides = [math.prod(self.device.shape[axis + 1 :]) for axis in range(1, self.device.dim())]
        return _words(
            arena.untyped_storage(),
            self.device.dtype,
            base // word,
            (arena.shape[0], *self.device.shape[1:]),
            (slot_stride // word, *strides),
        )


def _words(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """A view of words of `dtype` over a storage, of any dtype. Counts are in words."""
    # Engines register in inference mode; a view made there could not be written by another thread.
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


class _Layer(NamedTuple):
    """One layer's view, reduced to bytes. Offsets count from the start of the tensor's storage."""

    name: str
    storage: torch.UntypedStorage
    offset_bytes: int
    block: Axis
    axes: tuple[Axis, ...]  # outermost first, the run apart
    run_bytes: int
    content: str  # the part of the description that fixes the bytes of one block

    @property
    def bytes_per_block(self) -> int:
        return math.prod(axis.size for axis in self.axes) * self.run_bytes

    @property
    def block_extent_bytes(self) -> int:
        """From a block's first byte to its last one, gaps included."""
        return _extent_bytes(self.axes, self.run_bytes)

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end of all its blocks, in the storage."""
        return self.offset_bytes, self.offset_bytes + _extent_bytes((self.block, *self.axes), self.run_bytes)


class DeviceCache:
    """The registered KV tensors of one rank as regions of words, with the layout of a slot.

    Guarantees that no two blocks share a byte, so copies of different blocks may run in any order and at
    the same time. Keeps the tensors' storages alive.
    """

    def __init__(
        self,
        *,
        regions: Sequence[Region],
        layers: Mapping[str, Region],
        block_count: int,
        description: str,
        device: torch.device,
        run_bytes_min: int,
    ) -> None:
        assert regions
        assert block_count > 0, block_count
        self.regions = tuple(regions)
        self.layers = dict(layers)
        """Each layer's own region by the name it was registered under: the same bytes as in `regions`."""
        self.block_count = block_count
        self.description = description
        self.device = device
        self.shard_bytes = sum(region.bytes_per_block for region in regions)
        self.run_bytes_min = run_bytes_min

    @classmethod
    def from_tensors(cls, kv_caches: Mapping[str, torch.Tensor], block_count: int) -> DeviceCache:
        """Address the blocks of `kv_caches`: layer name → view with a block axis of `block_count`.

        Understood are views with the blocks first (`[B, H, N, C]` with any strides, `[B, N, C]`,
        `[B, 2, N, H, D]`) and with K and V first (`[2, B, N, H, D]`). A block axis that is a multiple of
        `block_count` holds that many kernel blocks per block, side by side. Views of the same memory
        (layers overlaid on one another) are kept once.

        Raises `KvbmError`, one line naming the layer, where blocks cannot be told apart.
        """
        if not kv_caches:
            raise KvbmError("registering KV caches: no layer was given")
        devices = {tensor.device for tensor in kv_caches.values()}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise KvbmError(f"registering KV caches: layers lie on {names}, one device is accepted")
        layers = _without_overlays([_reduce(name, tensor, block_count) for name, tensor in kv_caches.items()])
        _refuse_shared_bytes(layers)
        device = devices.pop()
        return cls(
            regions=_regions(layers),
            layers=_layer_regions(layers),
            block_count=block_count,
            description=_describe(layers),
            device=device,
            run_bytes_min=min(layer.run_bytes for layer in layers),
        )


def _block_axes(name: str, shape: Sequence[int], block_count: int) -> tuple[int, int]:
    """(index of the block axis, kernel blocks per block), or `KvbmError`.

    A size that equals `block_count` by chance (heads, tokens) must not be taken for it: a wrong axis would
    mix blocks without a word. So only the two places where engines put it are looked at.
    """
    fits = [axis for axis in (0, 1) if axis < len(shape) and shape[axis] == block_count]
    kv_first = len(shape) == 5 and shape[0] == 2
    if kv_first and fits == [0, 1]:
        raise KvbmError(
            f"registering KV caches: {name} has shape {list(shape)}, and with {block_count} blocks "
            "either of the first two axes could be the block's"
        )
    if fits and fits[0] == 0:
        return 0, 1
    if kv_first and fits == [1]:
        return 1, 1
    for axis in (1,) if kv_first else (0,):
        if axis < len(shape) and shape[axis] > block_count and shape[axis] % block_count == 0:
            return axis, shape[axis] // block_count
    raise KvbmError(
        f"registering KV caches: {name} has shape {list(shape)}, no axis of {block_count} blocks: "
        "accepted are [blocks, ...] and [2, blocks, tokens, heads, head size]"
    )


def _reduce(name: str, tensor: torch.Tensor, block_count: int) -> _Layer:
    """One layer's tensor as bytes: its block axis, the axes inside a block, and the run at the bottom."""
    if tensor.layout != torch.strided:
        raise KvbmError(f"registering KV caches: {name} is {tensor.layout}, accepted is torch.strided")
    if tensor.numel() == 0:
        raise KvbmError(f"registering KV caches: {name} has shape {list(tensor.shape)}, which holds no bytes")
    block_axis, kernel_blocks = _block_axes(name, tensor.shape, block_count)
    word = tensor.element_size()
    axes = [Axis(size, stride * word) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    kernel = axes.pop(block_axis)
    block = Axis(block_count, kernel.stride_bytes * kernel_blocks)
    if kernel_blocks > 1:
        axes.insert(block_axis, Axis(kernel_blocks, kernel.stride_bytes))
    # An axis of size 1 may carry any stride; it must not take part in ordering or in the overlap check.
    order = [index for index, axis in enumerate(axes) if axis.size > 1]
    order.sort(key=lambda index: -axes[index].stride_bytes)
    if not _disjoint([block, *(axes[index] for index in order)], word):
        raise KvbmError(
            f"registering KV caches: {name} has shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())}: blocks that share bytes are not accepted"
        )
    run_bytes, outer = _merge([axes[index] for index in order], word)
    content = (
        f"{str(tensor.dtype).removeprefix('torch.')}"
        f"[{','.join(str(axis.size) for axis in axes)}]@{','.join(map(str, order))}"
    )
    offset_bytes = tensor.storage_offset() * word
    return _Layer(name, tensor.untyped_storage(), offset_bytes, block, outer, run_bytes, content)


def _merge(axes: Iterable[Axis], word_bytes: int) -> tuple[int, tuple[Axis, ...]]:
    """(bytes of the contiguous run, axes above it), from axes ordered outermost first; neighbours joined."""
    run_bytes = word_bytes
    outer: list[Axis] = []
    for axis in reversed(list(axes)):
        if not outer and axis.stride_bytes == run_bytes:
            run_bytes *= axis.size
        elif outer and axis.stride_bytes == outer[0].stride_bytes * outer[0].size:
            outer[0] = Axis(axis.size * outer[0].size, outer[0].stride_bytes)
        else:
            outer.insert(0, axis)
    return run_bytes, tuple(outer)


def _extent_bytes(axes: Iterable[Axis], run_bytes: int) -> int:
    """Bytes from the first to the last one that the axes reach."""
    return sum((axis.size - 1) * axis.stride_bytes for axis in axes) + run_bytes


def _disjoint(axes: Iterable[Axis], run_bytes: int) -> bool:
    """Whether every position lies on bytes of its own: each axis steps over all that lies below it."""
    extent = run_bytes
    for axis in sorted((axis for axis in axes if axis.size > 1), key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes < extent:
            return False
        extent += (axis.size - 1) * axis.stride_bytes
    return True


def _without_overlays(layers: Sequence[_Layer]) -> list[_Layer]:
    """The layers without those whose bytes another one holds already, in order.

    Groups of a hybrid model lie on top of one another: equal views are the same layer to us, and a view that
    covers only the first part of another's contiguous block is contained in it.
    """
    kept: dict[tuple[object, ...], _Layer] = {}
    for layer in layers:
        place = (layer.storage.data_ptr() + layer.offset_bytes, layer.block)
        # A contiguous block is compared by where it starts; a scattered one must be equal in every axis.
        key = place if not layer.axes else (*place, layer.axes, layer.run_bytes)
        held = kept.get(key)
        if held is None:
            kept[key] = layer
        else:
            larger = layer if layer.run_bytes > held.run_bytes else held
            name = f"{held.name}{_OVERLAY}{layer.name}"
            content = held.content if held.content == layer.content else f"{held.content}={layer.content}"
            kept[key] = larger._replace(name=name, content=content)
    return list(kept.values())


def _refuse_shared_bytes(layers: Sequence[_Layer]) -> None:
    """`KvbmError` where a block of one layer lies on another block of another layer.

    Layers may lie apart, or be interleaved block by block (block-outermost layouts). Everything else would
    let a load of one block overwrite a different one.
    """
    by_place = sorted(layers, key=lambda layer: layer.storage.data_ptr() + layer.span[0])
    group: list[_Layer] = []
    group_end = 0
    for layer in by_place:
        base = layer.storage.data_ptr()
        start, end = base + layer.span[0], base + layer.span[1]
        if group and start >= group_end:
            group = []
        group.append(layer)
        group_end = max(group_end, end) if len(group) > 1 else end
        first = group[0]
        window = first.storage.data_ptr() + first.offset_bytes + first.block.stride_bytes
        if len(group) > 1 and (
            layer.block != first.block
            or start + layer.block_extent_bytes > window
            or first.block_extent_bytes > first.block.stride_bytes
        ):
            raise KvbmError(
                f"registering KV caches: blocks of {layer.name} lie on other blocks of {first.name}: "
                "accepted are layers side by side, interleaved block by block, or exactly overlaid"
            )


def _layer_regions(layers: Sequence[_Layer]) -> dict[str, Region]:
    """Each layer as a region of its own, at its place in the slot; overlaid layers share one."""
    regions: dict[str, Region] = {}
    slot_offset_bytes = 0
    for layer in layers:
        (region,) = _regions([layer], slot_offset_bytes)
        regions.update(dict.fromkeys(layer.name.split(_OVERLAY), region))
        slot_offset_bytes += layer.bytes_per_block
    return regions


def _regions(layers: Sequence[_Layer], slot_offset_bytes: int = 0) -> list[Region]:
    """Regions in slot order; neighbouring layers of one storage at a constant distance become one region."""
    regions: list[Region] = []
    for stack in _stacks(layers):
        first = stack[0]
        axes = first.axes
        if len(stack) > 1:
            axes = (Axis(len(stack), stack[1].offset_bytes - first.offset_bytes), *axes)
        run_bytes, axes = _grow_run(axes, first.run_bytes)
        bytes_per_block = first.bytes_per_block * len(stack)
        placed = [first.offset_bytes, first.block.stride_bytes, run_bytes, slot_offset_bytes]
        placed += [axis.stride_bytes for axis in axes]
        word, dtype = next(entry for entry in _WORDS if all(value % entry[0] == 0 for value in placed))
        view = _words(
            first.storage,
            dtype,
            first.offset_bytes // word,
            (first.block.size, *(axis.size for axis in axes), run_bytes // word),
            (first.block.stride_bytes // word, *(axis.stride_bytes // word for axis in axes), 1),
        )
        regions.append(Region(view, slot_offset_bytes, bytes_per_block))
        slot_offset_bytes += bytes_per_block
    return regions


def _grow_run(axes: tuple[Axis, ...], run_bytes: int) -> tuple[int, tuple[Axis, ...]]:
    """Join to the run what lies right behind it: layers of a block-outermost layout make one long run."""
    while axes and axes[-1].stride_bytes == run_bytes:
        run_bytes *= axes[-1].size
        axes = axes[:-1]
    return run_bytes, axes


def _stacks(layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """Cut the layers, in order, into stacks that one strided view can address."""
    stacks: list[list[_Layer]] = []
    for layer in layers:
        stack = stacks[-1] if stacks else None
        if stack is not None and _same_form(stack[0], layer):
            step = layer.offset_bytes - stack[-1].offset_bytes
            if step > 0 and (len(stack) == 1 or step == stack[-1].offset_bytes - stack[-2].offset_bytes):
                stack.append(layer)
                continue
        stacks.append([layer])
    return stacks


def _same_form(one: _Layer, other: _Layer) -> bool:
    """Whether two layers of one storage differ in nothing but where they start."""
    return one.storage.data_ptr() == other.storage.data_ptr() and (
        (one.block, one.axes, one.run_bytes) == (other.block, other.axes, other.run_bytes)
    )


def _describe(layers: Sequence[_Layer]) -> str:
    """The meaning of a slot's words: per run of equal layers the dtype, the block's shape, the memory order.

    `28*bfloat16[8,128,128]@1,0,2:name,name,…` reads: 28 layers, each block of shape [8, 128, 128] without the
    block axis, in memory axis 1 is the outermost, then 0, then 2 (axes of size 1 are left out).
    """
    parts = []
    for content, run in itertools.groupby(layers, key=lambda layer: layer.content):
        names = [layer.name for layer in run]
        parts.append(f"{len(names)}*{content}:{','.join(names)}")
    return ";".join(parts)
