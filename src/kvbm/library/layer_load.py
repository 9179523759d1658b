"""Loads into the layers of a KV cache, one after the other, for an engine that computes with the first ones by then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.transfer import Copier


class LayerLoad:
    """One load, of blocks that all lie in host memory and stay leased until it has ended.

    `pairs` are (device block, slot) of each. `intact()` says whether every slot still holds its block, and `ended` is
    told at the end whether all was right.
    """

    def __init__(
        self,
        copier: Copier,
        pairs: Sequence[tuple[int, int]],
        intact: Callable[[], bool],
        ended: Callable[[bool], None],
    ) -> None:
        self._copier, self._pairs, self._intact, self._ended = copier, pairs, intact, ended

    def copy(self, layers: Iterable[str]) -> None:
        """Copy these layers of all blocks; they can be read when it returns. Raises KvbmError or RuntimeError."""
        begun = [self._copier.begin_load(self._pairs, layer=layer) for layer in layers]
        for copying in begun:
            copying.wait()

    def end(self) -> bool:
        """Whether everything that was copied was what it should be. Called once, before anybody may trust the last
        layer, and also when `copy` has raised."""
        right = self._intact()
        self._ended(right)
        return right
