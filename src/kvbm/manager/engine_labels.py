"""Names of engines in metrics: the model and the data-parallel rank, of which there are few; never an engine's id."""

from __future__ import annotations

from collections.abc import Collection

from kvbm.observe.metric_table import OTHER_ENGINES

LABELS_MAX = 64
"""A series stays as long as the manager lives; engines beyond so many names share one."""
_MODEL_CHARACTERS_MAX = 96
_KIND_CHARACTERS_MAX = 16


class EngineLabels:
    """Gives each engine a name that a restart of it gets again."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def name(self, model: str, data_parallel_rank: int, taken: Collection[str], kind: str = "") -> str:
        """`MODEL/dpRANK`, behind its kind and a slash where it has one; where an engine that is present
        has `taken` that name, the first of `#2`, `#3`, … is added.

        `OTHER_ENGINES` once `LABELS_MAX` names are in use.
        """
        software = f"{kind[:_KIND_CHARACTERS_MAX]}/" if kind else ""
        base = f"{software}{model[-_MODEL_CHARACTERS_MAX:]}/dp{data_parallel_rank}"
        numbered = (base if number == 1 else f"{base}#{number}" for number in range(1, len(taken) + 2))
        label = next(name for name in numbered if name not in taken)
        if label not in self._known and len(self._known) >= LABELS_MAX:
            return OTHER_ENGINES
        self._known.add(label)
        return label
