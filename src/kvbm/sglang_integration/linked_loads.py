"""Loads of a linker: pages are leased when a request is matched, and copied layer by layer beside its forward pass.

Owned by the keeper's thread, but for `Layers`, which says how far a batch is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvbm.block import BlockKey
from kvbm.clock import Clock
from kvbm.library.block_manager import Hit
from kvbm.library.layer_load import LayerLoad
from kvbm.sglang_integration.device_pages import DevicePages
from kvbm.sglang_integration.pages_kept import PagesKept

log = logging.getLogger("kvbm.sglang")

LEASES_MAX = 256
"""Requests whose pages are leased before they are loaded."""
LEASE_S = 10.0
"""How long a request's pages stay leased without being loaded."""
UNUSED, DEADLINE = "unused", "deadline"


class Counter(Protocol):
    """SGLang's account of how far the layers of a batch are."""

    def complete(self, index: int, layer: int) -> None:
        """A layer of all requests of a batch has arrived."""

    def fail(self, index: int, error: BaseException) -> None:
        """No further layer of a batch will."""


@dataclass(frozen=True)
class Wanted:
    """Pages of one pool that a request is to get: their hashes, and the pool's pages to load them into."""

    pool: str
    hashes: Sequence[str]
    numbers: Sequence[int]


@dataclass(frozen=True)
class Asked:
    """Pages of one pool that a request would like to have, of which it `needs` so many of the first."""

    hashes: Sequence[str]
    needed: int


@dataclass(eq=False)
class _Leased:
    hits: dict[str, tuple[Hit, Sequence[str], list[BlockKey] | None]]
    """Of each pool: what is leased, and the pages' hashes and keys."""
    until_s: float
    held: ExitStack = field(default_factory=ExitStack)


class LinkedLoads:
    """See the module. `pools` are the kept pages by name, `pages` where they lie on the device."""

    def __init__(
        self, pools: Mapping[str, PagesKept], pages: Mapping[str, DevicePages], layer_count: int, clock: Clock
    ) -> None:
        self._pools, self._pages, self._layer_count, self._clock = pools, pages, layer_count, clock
        self._leased: dict[str, _Leased] = {}

    def lease(self, request: str, asked: Mapping[str, Asked]) -> bool:
        """Ask for a request's pages in each pool and lease what is held; whether all that it needs lies in host memory.

        What is only on disk is brought up, for the next time, as long as the lease lasts. That a request missed is
        known to the manager by this.
        """
        self.drop(request, DEADLINE)
        leased, complete = _Leased({}, self._clock() + LEASE_S), True
        for name, each in asked.items():
            keys = self._pools[name].keys(each.hashes)
            opened = self._pools[name].open(each.hashes, request)
            if opened is not None:
                hit, held = opened
                leased.held.push(held)
                leased.hits[name] = hit, each.hashes, keys
                complete = complete and hit.ready()[0] >= each.needed
            else:
                complete = complete and not each.needed
        if leased.hits:
            self._leased[request] = leased
        while len(self._leased) > LEASES_MAX:
            self.drop(next(iter(self._leased)), DEADLINE)
        return complete

    def load(
        self,
        index: int,
        batch: Mapping[str, Sequence[Wanted]],
        counter: Counter,
        ready: Callable[[], None],
    ) -> bool:
        """Load a batch's requests, the first layer of all of them first, and then the next. `ready()` waits until the
        device's pages may be written to. Whether all arrived: the counter knows it too."""
        loads: list[tuple[LayerLoad, DevicePages]] = []
        try:
            ready()
            for request, each in batch.items():
                loads += self._begin(request, each)
            for layer in range(self._layer_count):
                for load, pages in loads:
                    if pages.layers[layer]:
                        load.copy(pages.layers[layer])
                if layer == self._layer_count - 1:
                    ended, loads = [load.end() for load, _ in loads], []
                    if not all(ended):
                        raise RuntimeError("a leased page was not what it should be")
                counter.complete(index, layer)
        except BaseException as error:
            log.exception("KVBM could not load pages that it had promised: SGLang aborts these requests")
            counter.fail(index, error)
            return False
        finally:
            for load, _ in loads:
                load.end(whole=False)
            for request in batch:
                self.drop(request)
        return True

    def _begin(self, request: str, wanted: Sequence[Wanted]) -> list[tuple[LayerLoad, DevicePages]]:
        leased = self._leased.get(request)
        if leased is None:
            raise RuntimeError(f"the lease of request {request} has ended")
        begun = []
        for each in wanted:
            hit, hashes, keys = leased.hits[each.pool]
            if list(hashes[: len(each.hashes)]) != list(each.hashes):
                raise RuntimeError(f"request {request} loads other pages than were leased")
            if keys is None or keys != self._pools[each.pool].keys(hashes):
                raise RuntimeError(f"the weights have changed since pages were leased for request {request}")
            pages, manager = self._pages[each.pool], self._pools[each.pool].manager()
            load = (
                manager.onboard_by_layer([(hit, each.numbers)], pages.cache) if manager is not None else None
            )
            if load is None:
                raise RuntimeError(f"pages of request {request} have gone")
            begun.append((load, pages))
        return begun

    def drop(self, request: str, reason: str = UNUSED) -> None:
        """End a request's lease; what of it was not loaded was left for this reason (`protocol.UNLOADED_REASONS`)."""
        leased = self._leased.pop(request, None)
        if leased is not None:
            for hit, _, _ in leased.hits.values():
                hit.leave(reason)
            leased.held.close()

    def tick(self) -> None:
        """End the leases of requests that nobody loaded."""
        now_s = self._clock()
        for request in [name for name, leased in self._leased.items() if leased.until_s <= now_s]:
            self.drop(request, DEADLINE)

    def close(self) -> None:
        """End all leases."""
        for request in list(self._leased):
            self.drop(request)


def on_device_of(pages: Mapping[str, DevicePages]) -> Callable[[], None]:
    """Makes the pools' device the current one of the calling thread."""
    device = next(iter(next(iter(pages.values())).cache.values())).device

    def choose() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return choose
