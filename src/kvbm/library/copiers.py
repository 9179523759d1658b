"""Copiers between the caller's KV caches and the slots: one for each set of tensors, made when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvbm.errors import CopyHung, SettingsError
from kvbm.layout import BlockLayout

if TYPE_CHECKING:
    import torch

    from kvbm.transfer import Copier, DeviceCache
    from kvbm.transfer.copier import Pairs

_KV_CACHES_MAX = 4


class Copiers:
    """`make` gives the copier of a KV cache. Only a few are kept: the oldest is dropped.

    Blocks are bytes: a cache whose dimensions lie in another order would get them back shuffled, so all caches must be
    laid out alike.
    """

    def __init__(self, layout: BlockLayout, make: Callable[[DeviceCache], Copier]) -> None:
        self._layout = layout
        self._make = make
        self._copiers: dict[tuple[object, ...], Copier] = {}
        self._device_layout = ""

    def __len__(self) -> int:
        return len(self._copiers)

    def of(self, kv_cache: Mapping[str, torch.Tensor]) -> Copier:
        """The copier of this KV cache. Raises SettingsError for one of another size or order of dimensions."""
        from kvbm.transfer import DeviceCache

        identity = tuple(
            (name, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            for name, tensor in kv_cache.items()
        )
        copier = self._copiers.get(identity)
        if copier is None:
            cache = DeviceCache.from_tensors(kv_cache, next(iter(kv_cache.values())).shape[0])
            if cache.shard_bytes != self._layout.shard_bytes:
                raise SettingsError(
                    "layout.shard_bytes",
                    self._layout.shard_bytes,
                    f"{cache.shard_bytes}, the bytes of a block over the {len(kv_cache)} layers of this KV cache",
                )
            if cache.description != (self._device_layout or cache.description):
                raise SettingsError("kv_cache", cache.description, self._device_layout)
            self._device_layout = cache.description
            # On CUDA a copier page-locks the slots, which only one at a time can.
            kept_max = _KV_CACHES_MAX - 1 if cache.device.type != "cuda" else 0
            while len(self._copiers) > kept_max:
                self._copiers.pop(next(iter(self._copiers))).close()
            copier = self._copiers[identity] = self._make(cache)
        return copier

    def store(self, kv_cache: Mapping[str, torch.Tensor], pairs: Pairs) -> None:
        """Copy device blocks into slots. Also when it raises, nothing writes to the slots any more: others get them.
        After CopyHung something may, and others must not."""
        copier = self.of(kv_cache)
        try:
            copier.store(pairs)
        except CopyHung:
            raise
        except BaseException:
            self.close()  # an interrupt leaves copies under way: this waits for them
            raise

    def close(self) -> None:
        """Close them all; the next use makes new ones."""
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()
