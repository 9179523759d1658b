"""A hit of the library: blocks that were found for a prompt, leased until it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kvbm.block import Tier
from kvbm.errors import KvbmError, SettingsError
from kvbm.grouping import Grouping, sources_of_prompt
from kvbm.hints import Verdict
from kvbm.layout import BlockLayout
from kvbm.library.backend import Backend, Run
from kvbm.library.tables import Table, to_load
from kvbm.protocol import UNLOADED_REASONS

if TYPE_CHECKING:
    import torch


class Holder(Protocol):
    """Who holds the blocks: the `BlockManager`."""

    layout: BlockLayout

    @property
    def backend(self) -> Backend:
        """Where the blocks are kept."""

    grouping: Grouping | None

    def onboard_run(
        self,
        run: Run,
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int],
        first: int = 0,
        of_prompt: int | None = None,
    ) -> int:
        """Copy blocks of a run, from the position `first` on, into these device blocks, and count them; how many
        arrived. `of_prompt` is how many blocks of the prompt they stand for, where that is another number."""


class Hit:
    """The blocks that were found for a prompt after those that `match` skipped, leased inside the `with` statement.

    `blocks` of them are held in a row, `tokens` tokens; `host`, `disk` and `remote` say where they were found.

    Of a layout with several groups `blocks` ends at a boundary at which every group holds what it needs there, and
    `needed` says which of its own blocks each group needs on the device for that.

    `verdicts` say what became of each part of a hint that came with the question.
    """

    def __init__(
        self, holder: Holder, run: Run | None, skip: int, verdicts: tuple[Verdict, ...] = ()
    ) -> None:
        self._holder = holder
        self.run = run
        self.verdicts = verdicts
        self._skip = skip
        self._ended = False
        sources = run.sources if run is not None else b""
        grouping, boundary = holder.grouping, run.boundary if run is not None else 0
        self.needed: tuple[range, ...] = ()
        if grouping is not None:
            self.needed = tuple(each.needed(boundary) for each in grouping.groups)
            sources = sources_of_prompt(sources, boundary - skip)
        self.blocks = len(sources)
        self.tokens = self.blocks * holder.layout.block_tokens
        self.host = sources.count(Tier.HOST)
        self.disk = sources.count(Tier.DISK)
        self.remote = sources.count(Tier.REMOTE)

    def ready(self) -> tuple[int, bool]:
        """How many leading blocks can be onboarded without waiting, and whether more will follow."""
        self.must_be_held()
        return self._holder.backend.ready(self.run) if self.run is not None else (0, False)

    def onboard(
        self,
        kv_cache: Mapping[str, torch.Tensor],
        device_blocks: Sequence[int] | Sequence[Table],
        first: int = 0,
    ) -> int:
        """Copy the hit into `device_blocks` of the KV cache, `[blocks]`: one per block, from the first found on.

        `kv_cache` maps layer names to tensors `[blocks, …]`. Where `match` skipped n blocks, the first device block
        gets the prompt's block n. Device blocks beyond the hit are left alone; with fewer, so many blocks are copied.
        A hit can be copied in parts, in order: `first` is how many of its blocks a part leaves out (one group only).

        Of a layout with several groups `device_blocks` has a list for each group: the device block of each of the
        group's own blocks from the prompt's first one on, None where it needs none (see `needed`). Blocks of the prompt
        that `match` skipped are not loaded. All of the hit arrives, or it does not count: the answer is `blocks`, or 0.

        Returns how many leading blocks of the hit arrived: blocks that come from disk or a store and fail their check
        do not, nor do those of a store that is away, or of a shared manager that goes. The caller computes from there
        on. Raises KvbmError after the `match` block has ended: the slots may hold anything by then.
        """
        self.must_be_held()
        if not 0 <= first <= self.blocks:
            raise SettingsError("first", first, f"0 to {self.blocks}, the blocks of the hit")
        if self.run is None:
            return 0
        grouping = self._holder.grouping
        if grouping is None:
            return self._holder.onboard_run(self.run, kv_cache, device_blocks, first)  # type: ignore[arg-type]  # no tables
        if first:
            raise SettingsError("first", first, "0: a hit of several groups is loaded whole")
        wanted = to_load(grouping, self.run.boundary, self._skip, device_blocks)  # type: ignore[arg-type]  # tables
        arrived = self._holder.onboard_run(self.run, kv_cache, wanted, of_prompt=self.blocks)
        return self.blocks if arrived == len(wanted) else 0

    def leave(self, reason: str) -> None:
        """What of the hit is not onboarded is left for this reason: what `kvbm why` says of it at a shared manager.

        `reason` is one of `protocol.UNLOADED_REASONS`; without a word it is `unused`.
        """
        assert reason in UNLOADED_REASONS, reason
        if self.run is not None:
            self.run.left_because = reason

    def must_be_held(self) -> None:
        """Raises KvbmError once they are not."""
        if self._ended:
            raise KvbmError(
                "hit.onboard after its `with manager.match(…)` block: the blocks are no longer held"
            )

    def end(self) -> None:
        """The blocks are no longer held."""
        self._ended = True
