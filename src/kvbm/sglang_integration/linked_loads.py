"""Loads of a linker: pages are leased when a request is matched, and copied layer by layer beside its forward pass.

Owned by the keeper's thread, but for the counter, which says how far a batch is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvbm.block import BlockKey
from kvbm.clock import Clock
from kvbm.errors import CopyHung
from kvbm.library.hit import Hit
from kvbm.library.layer_load import LayerLoad
from kvbm.sglang_integration.device_pages import DevicePages
from kvbm.sglang_integration.pages_kept import PagesKept
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.sglang")

LEASES_MAX = 256
"""Requests whose pages are leased before they are loaded."""
LEASE_S = 10.0
"""How long a request's pages stay leased without being loaded."""
UNUSED, DEADLINE = "unused", "deadline"


class Event(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Whether the device has got there."""


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
        self._accepted: dict[str, tuple[_Leased, list[tuple[LayerLoad, DevicePages]]]] = {}

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

    def accept(self, request: str, wanted: Sequence[Wanted]) -> bool:
        """Whether a load of these pages cannot fail any more, as far as anybody can know: they are leased, lie in host
        memory, and were computed with the present weights. From then on they stay so until `load` or `drop`."""
        leased = self._leased.pop(request, None)
        if leased is None:
            return False
        loads: list[tuple[LayerLoad, DevicePages]] = []
        for each in wanted:
            load = self._begin(leased, each)
            if load is None:
                self._end(leased, loads, DEADLINE)
                return False
            loads.append((load, self._pages[each.pool]))
        self._accepted[request] = leased, loads
        return True

    def _begin(self, leased: _Leased, wanted: Wanted) -> LayerLoad | None:
        hit, hashes, keys = leased.hits.get(wanted.pool, (None, (), None))
        pool = self._pools[wanted.pool]
        manager = pool.manager()
        same = list(hashes[: len(wanted.hashes)]) == list(wanted.hashes) and keys == pool.keys(hashes)
        if hit is None or keys is None or not same or manager is None:
            return None
        leased.held.enter_context(manager.staying())
        return manager.onboard_by_layer([(hit, wanted.numbers)], self._pages[wanted.pool].cache)

    def load(
        self, index: int, requests: Sequence[str], counter: Counter, event: Event, others: Callable[[], bool]
    ) -> Generator[None, None, bool]:
        """Load a batch's requests, which were accepted: the first layer of all of them, and then the next.

        It begins after `event`, the end of the device's work with these pages. `others()` says whether other jobs wait.
        Whether all arrived: the counter knows it too.
        """
        batch = [self._accepted[request] for request in requests]
        try:
            while not event.query():
                yield
            for layer in range(self._layer_count):
                for load, pages in (each for _, loads in batch for each in loads):
                    if pages.layers[layer]:
                        load.copy(pages.layers[layer])
                if layer == self._layer_count - 1:
                    right = [self._settle(request) for request in requests]
                    if not all(right):
                        raise RuntimeError("a leased page was not what it should be")
                counter.complete(index, layer)
                if others():
                    yield
        except GeneratorExit as ended:
            counter.fail(index, ended)
            raise
        except CopyHung:
            log.exception(
                "pages that KVBM loads do not arrive: the device or its driver hangs. The batch is not ended, because "
                "its pages may still be written; restart the engine"
            )
            raise
        except Exception as error:
            record_swallowed(error)
            log.exception("KVBM could not load pages that it had promised: SGLang aborts these requests")
            counter.fail(index, error)
            return False
        finally:
            for request in requests:
                self.drop(request)
        return True

    def _settle(self, request: str) -> bool:
        """End a request's loads; whether all that was copied was right."""
        leased, loads = self._accepted[request]
        self._accepted[request] = leased, []
        right = [load.end() for load, _ in loads]
        return all(right)

    def _end(self, leased: _Leased, loads: Sequence[tuple[LayerLoad, DevicePages]], reason: str) -> None:
        for load, _ in loads:
            load.end(whole=False)
        for hit, _, _ in leased.hits.values():
            hit.leave(reason)
        leased.held.close()

    def drop(self, request: str, reason: str = UNUSED) -> None:
        """End a request's lease; what of it was not loaded was left for this reason (`protocol.UNLOADED_REASONS`)."""
        leased = self._leased.pop(request, None)
        if leased is not None:
            self._end(leased, (), reason)
        accepted = self._accepted.pop(request, None)
        if accepted is not None:
            self._end(*accepted, reason)

    def tick(self) -> None:
        """End the leases of requests that nobody loaded."""
        now_s = self._clock()
        for request in [name for name, leased in self._leased.items() if leased.until_s <= now_s]:
            self.drop(request, DEADLINE)

    def close(self) -> None:
        """End all leases."""
        for request in (*self._leased, *self._accepted):
            self.drop(request)


def on_device_of(pages: Mapping[str, DevicePages]) -> Callable[[], None]:
    """Makes the pools' device the current one of the calling thread."""
    device = next(iter(next(iter(pages.values())).cache.values())).device

    def choose() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return choose
