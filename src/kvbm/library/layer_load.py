"""Loads into the layers of a KV cache, one after the other, for an engine that computes with the first ones by then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvbm.errors import CopyHung, KvbmError

if TYPE_CHECKING:
    from kvbm.transfer import Copier
    from kvbm.transfer.copier import Copying


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
        self._copier, self._parts, self._intact, self._ended = copier, _parts(pairs), intact, ended

    def copy(self, layers: Iterable[str]) -> None:
        """Copy these layers of all blocks; they can be read when it returns. Raises KvbmError or RuntimeError, and
        nothing is written any more by then: the device blocks may be given to others. Not so after CopyHung."""
        begun: list[Copying] = []
        errors: list[Exception] = []
        try:
            for layer in layers:
                for pairs in self._parts:
                    begun.append(self._copier.begin_load(pairs, layer=layer))
        finally:
            for copying in begun:
                try:
                    copying.wait()
                except CopyHung:
                    raise  # so do those behind it
                except (KvbmError, RuntimeError) as error:
                    errors.append(error)
        for failed in errors:
            raise failed

    def end(self, whole: bool = True) -> bool:
        """Whether everything that was copied was what it should be. Called once, before anybody may trust the last
        layer, and also when `copy` has raised: then the load is not `whole`, and counts as failed."""
        right = whole and self._intact()
        self._ended(right)
        return right


def _parts(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs, divided so that no slot is twice in a part: requests of one batch may begin alike."""
    parts: list[list[tuple[int, int]]] = []
    seen: Counter[int] = Counter()
    for block, slot in pairs:
        if seen[slot] == len(parts):
            parts.append([])
        parts[seen[slot]].append((block, slot))
        seen[slot] += 1
    return parts
