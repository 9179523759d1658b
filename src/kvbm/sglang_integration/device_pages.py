"""Pages of SGLang's device pools as blocks of a KV cache: the rows of all layers, where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvbm.sglang_integration.host_pages import PagesInPlace


class DevicePages(PagesInPlace):
    """One physical pool of SGLang's pool group (`DevicePoolEntry`); see `host_pages.Pages`.

    `layers[i]` names the tensors of `cache` that the engine's layer i reads; empty for a layer that has none here.
    """

    def __init__(self, entry: Any, layer_count: int) -> None:
        span = int(entry._row_span)
        rows = min(int(buffer.shape[0]) for group in entry.components for buffer in group)
        super().__init__(int(entry.page_size), rows // span)
        self.entry = entry
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


def _indices(mapped: Any) -> Sequence[int]:
    if mapped is None:
        return ()
    return (mapped,) if isinstance(mapped, int) else tuple(mapped)
