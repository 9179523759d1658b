"""Blocks get other keys: all are forgotten, or the weights are others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvbm.leader.announced import Announced
from kvbm.leader.link import Link
from kvbm.leader.lookups import Lookups
from kvbm.leader.offers import Offers
from kvbm.leader.stores import Stores
from kvbm.leader.tracked import Scheduled, Tracked
from kvbm.leader.weights_known import WeightsKnown
from kvbm.protocol import Reset


@dataclass(slots=True, eq=False)
class Renewal:
    """Tells the parts of the leader that keys have changed. `requests` is the leader's."""

    link: Link
    weights: WeightsKnown
    stores: Stores
    offers: Offers
    lookups: Lookups
    announced: Announced
    requests: Mapping[str, Tracked]

    def reset(self, keep_disk: bool, device_emptied: bool) -> None:
        """Forget all blocks.

        Keys change, so that blocks of before and after (perhaps of other weights) never mix. The manager drops older
        ones, unless another engine uses them; with `keep_disk` those on disk stay for the next start. An engine with
        running requests keeps its device's cache (not `device_emptied`): until it is emptied, requests that use blocks
        of it are neither loaded nor stored.
        """
        self.weights.renew(device_emptied)
        self._forget_keys()
        self.announced.again()
        self.link.send(Reset(tier="host" if keep_disk else ""))

    def weights_changed(self) -> None:
        """The ranks compute with other weights."""
        self.weights.changed()
        self._forget_keys()

    def weights_named(self, version: str) -> None:
        """The trainer names the ranks' weights."""
        if self.weights.named(version):
            self._forget_keys()

    def device_was_reset(self, weights_may_change: bool) -> None:
        """The engine emptied its device's cache."""
        if self.weights.device_was_reset(weights_may_change):
            self._forget_keys()
        self.announced.again()

    def mark_outdated(self, scheduled: Iterable[Scheduled]) -> None:
        """While the device may hold KV of before: requests that begin on a part of a block, which no match tells of,
        depend on it too."""
        for entry in scheduled if self.weights.device_mixed else ():
            tracked = self.requests.get(entry.request)
            if tracked is not None and not tracked.begun and entry.computed_tokens > 0:
                tracked.outdated = True

    def _forget_keys(self) -> None:
        """Stores under the old keys are not committed: their device blocks may be overwritten before they are
        copied."""
        self.stores.doubt()
        for request, tracked in self.requests.items():
            self.lookups.drop(request)
            tracked.keys_changed()
