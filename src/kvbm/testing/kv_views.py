"""KV caches as engines lay them out, small, and the bytes of their blocks, read the slow way."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import partial

import torch

from kvbm.layout import round_up
from kvbm.transfer.copier import arena_tensor

BLOCKS = 9
SLOTS = 11
PAGE = mmap.PAGESIZE
PADDING = 0xA5
SIZES = {"L": 3, "B": BLOCKS, "H": 2, "N": 4, "C": 16}
"""Layers, blocks, heads, tokens of a block, elements of a token's head."""

PAIRS = [(3, 9), (4, 10), (0, 0), (8, 4), (7, 5), (1, 2), (2, 3)]
"""Blocks and the slots that they are stored in: neighbours on both sides, on one side, and on none."""

Views = dict[str, torch.Tensor]
"""Layer name → the view that an engine registers."""


def stacked(order: str, dtype: torch.dtype, sizes: Mapping[str, int] = SIZES) -> Views:
    """All layers in one allocation, with its axes in this order of memory."""
    whole = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {f"layer.{index}": logical[index] for index in range(sizes["L"])}


def separate(shape: tuple[int, ...], dtype: torch.dtype) -> Views:
    """Three layers, each an allocation of its own."""
    return {f"layer.{index}": torch.zeros(shape, dtype=dtype) for index in range(3)}


def padded(dtype: torch.dtype) -> Views:
    """Blocks apart, heads apart, and no axis that neighbours another one."""
    whole = torch.zeros(2000, dtype=dtype)
    return {"layer.0": whole.as_strided((BLOCKS, 2, 4, 5), (200, 90, 20, 3), 7)}


def split_kernel_blocks(dtype: torch.dtype) -> Views:
    """Two blocks of the engine's kernel for each of its own."""
    return {"layer.0": torch.zeros(2 * BLOCKS, 2, 4, 6, dtype=dtype).transpose(1, 2)}


LAYOUTS: dict[str, Callable[[torch.dtype], Views]] = {
    **{order: partial(stacked, order) for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
    "columns first": lambda dtype: stacked("LBCNH", dtype),
    "blocks innermost": lambda dtype: stacked("LHNCB", dtype),
    "separate": lambda dtype: separate((BLOCKS, 2, 4, 16), dtype),
    "keys and values first": lambda dtype: separate((2, BLOCKS, 4, 2, 8), dtype),
    "keys and values second": lambda dtype: separate((BLOCKS, 2, 4, 2, 8), dtype),
    "mla": lambda dtype: separate((BLOCKS, 1, 4, 18), dtype),
    "odd sizes": lambda dtype: separate((BLOCKS, 1, 3, 5), dtype),
    "padded": padded,
    "kernel blocks": split_kernel_blocks,
}
"""Where each block of each layer lies, by name; each with `BLOCKS` blocks."""


def block_axis(view: torch.Tensor, block_count: int) -> int:
    """The axis of blocks, as `DeviceCache.from_tensors` takes it."""
    return 1 if view.dim() == 5 and view.shape[0] == 2 and view.shape[1] % block_count == 0 else 0


def block_bytes(views: Views, block: int, block_count: int = BLOCKS) -> bytes:
    """The bytes that a slot must hold, made the slow way: layers in order, axes in the order of memory."""
    out = b""
    for view in views.values():
        axis = block_axis(view, block_count)
        each = view.shape[axis] // block_count
        part = view.narrow(axis, block * each, each)
        axes = sorted((a for a in range(part.dim()) if part.shape[a] > 1), key=lambda a: -part.stride(a))
        rest = [a for a in range(part.dim()) if part.shape[a] == 1]
        out += part.permute(rest + axes).contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return out


def block_parts(views: Views, block: int) -> dict[str, bytes]:
    """`block_bytes`, layer by layer."""
    return {name: block_bytes({name: view}, block) for name, view in views.items()}


def whole_bytes(views: Views) -> list[bytes]:
    """All bytes of the storages, gaps included."""
    return [_storage(view).cpu().numpy().tobytes() for view in views.values()]


def scramble(views: Views, seed: int) -> None:
    """Fill the storages, gaps included, with bytes that the seed gives."""
    for index, view in enumerate(views.values()):
        noise = torch.Generator().manual_seed(seed * 1000 + index)
        content = _storage(view)
        content.copy_(torch.randint(0, 256, content.shape, dtype=torch.uint8, generator=noise))


def new_arena(shard_bytes: int, slot_count: int = SLOTS) -> torch.Tensor:
    """A host arena of whole pages, filled with `PADDING`; each slot is larger than a block."""
    slot_bytes = round_up(shard_bytes + 1, PAGE)
    arena = arena_tensor(mmap.mmap(-1, slot_count * slot_bytes), slot_count, slot_bytes)
    arena.fill_(PADDING)
    return arena


def _storage(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
