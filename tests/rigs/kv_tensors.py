"""KV tensors as engines lay them out, filled with noise."""

from __future__ import annotations

from collections.abc import Mapping

import torch

SIZES = {"L": 3, "B": 9, "H": 2, "N": 4, "C": 16}
SLOTS = 11
PADDING = 0xA5
PAIRS = [(3, 9), (4, 10), (0, 0), (8, 4), (7, 5), (1, 2), (2, 3)]
"""(device block, slot): what tests store."""

Views = dict[str, torch.Tensor]


def stacked(order: str, dtype: torch.dtype, sizes: Mapping[str, int] = SIZES) -> Views:
    """Layers in one allocation, its axes in this order: layer, block, head, token, content."""
    whole = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {f"layer.{index}": logical[index] for index in range(sizes["L"])}


def separate(shape: tuple[int, ...], dtype: torch.dtype) -> Views:
    """An allocation for each of three layers."""
    return {f"layer.{index}": torch.zeros(shape, dtype=dtype) for index in range(3)}


def scramble(views: Views, seed: int) -> None:
    """Fill the tensors, and what lies between their blocks, with noise."""
    for index, view in enumerate(views.values()):
        noise = torch.Generator().manual_seed(seed * 1000 + index)
        content = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
        content.random_(0, 256, generator=noise)
