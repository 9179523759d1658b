"""Pages of SGLang's device pools as blocks of a KV cache: the rows of all layers, where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvbm.errors import KvbmError


class DevicePages:
    """One physical pool of SGLang's pool group (`DevicePoolEntry`); see `host_pages.Pages`.

    `layers[i]` names the tensors of `cache` that the engine's layer i reads; empty for a layer that has none here.
    """

    def __init__(self, entry: Any, layer_count: int) -> None:
        span = int(entry._row_span)
        self.entry = entry
        self.page_tokens = int(entry.page_size)
        rows = min(int(buffer.shape[0]) for group in entry.components for buffer in group)
        self.count = rows // span
        self.cache: dict[str, torch.Tensor] = {}
        names: list[list[str]] = []
        for number, group in enumerate(entry.components):
            names.append([f"{number}.{index}" for index in range(len(group))])
            for name, buffer in zip(names[-1], group, strict=True):
                self.cache[name] = buffer[: self.count * span].unflatten(0, (self.count, span))
        self.page_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in self.cache.values())
        self.batch = self.count
        mapping = entry.layer_mapping
        read = [_indices(mapping.get(layer)) for layer in range(layer_count)]
        self.layers = [[group[index] for group in names for index in indices] for indices in read]

    def numbers(self, indices: torch.Tensor) -> list[int]:
        """The pages that these token indices are of. Raises KvbmError for others."""
        span = self.page_tokens
        first = indices[::span].tolist() if len(indices) % span == 0 else [-1]
        if any(index % span or not 0 <= index < self.count * span for index in first):
            raise KvbmError(
                f"device_indices {first[:4]}…: accepted are beginnings of the pool's {self.count} pages"
            )
        return [index // span for index in first]

    def put(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def take(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def taken(self, numbers: Sequence[int]) -> None:
        """They lie where they belong."""


def _indices(mapped: Any) -> Sequence[int]:
    if mapped is None:
        return ()
    return (mapped,) if isinstance(mapped, int) else tuple(mapped)
