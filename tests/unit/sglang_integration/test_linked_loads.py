"""Loads of a linker at a real manager: leased or not, layer by layer, and a failure is told before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="pages are torch tensors; torch is not installed")

import torch

from kvbm.manager.space import Space
from kvbm.sglang_integration.device_pages import DevicePages
from kvbm.sglang_integration.linked_loads import LEASE_S, LEASES_MAX, Asked, LinkedLoads, Wanted, on_device_of
from kvbm.transfer import CpuCopier
from rigs.kept_pages import KeptHouse, hashes_of, run
from rigs.sglang_pools import PAGE_TOKENS

CHAIN = hashes_of("a b c d e f")
LAYERS, PAGES = 3, 24


class Event:
    """The device gets there after so many looks."""

    def __init__(self, looks: int = 0) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Counter:
    """SGLang's account, and what was in the pages when a layer was told."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.failed: list[str] = []
        self.at: Callable[[int], None] = lambda layer: None

    def complete(self, index: int, layer: int) -> None:
        assert index == 5
        self.at(layer)
        self.done.append(layer)

    def fail(self, index: int, error: BaseException) -> None:
        self.failed.append(str(error))


def device_pages(seed: int) -> DevicePages:
    noise = torch.Generator().manual_seed(seed)
    groups = [
        [torch.randn(PAGES * PAGE_TOKENS, 2, 8, generator=noise) for _ in range(LAYERS)] for _ in range(2)
    ]
    mapping = {layer: layer for layer in range(LAYERS)}
    entry: Any = SimpleNamespace(
        page_size=PAGE_TOKENS, _row_span=PAGE_TOKENS, components=groups, layer_mapping=mapping
    )
    return DevicePages(entry, LAYERS)


class Linked:
    """One engine's device pages, filled with its own noise."""

    def __init__(self, house: KeptHouse, seed: int) -> None:
        self.pages = device_pages(seed)
        self.kept = house.pool_of(self.pages)
        self.loads = LinkedLoads({"kv": self.kept}, {"kv": self.pages}, LAYERS, house.clock)
        self.counter = Counter()

    def store(self, hashes: Sequence[str], numbers: Sequence[int]) -> None:
        assert all(run(self.kept.store(hashes, numbers)))

    def load(self, batch: Mapping[str, Sequence[Wanted]], event: Event | None = None) -> bool:
        """Accept a batch and load it."""
        assert all(self.loads.accept(request, each) for request, each in batch.items())
        return run(self.loads.load(5, list(batch), self.counter, event or Event(), lambda: False))

    def layer(self, layer: int, number: int) -> torch.Tensor:
        return torch.stack([self.pages.cache[name][number] for name in self.pages.layers[layer]]).clone()


def wanted(hashes: Sequence[str], numbers: Sequence[int]) -> list[Wanted]:
    return [Wanted("kv", hashes, numbers)]


def lease(linked: Linked, request: str, hashes: Sequence[str], needed: int | None = None) -> bool:
    """Lease pages, by default all of them."""
    return linked.loads.lease(request, {"kv": Asked(hashes, len(hashes) if needed is None else needed)})


def test_a_layer_is_there_when_it_is_told_and_the_next_one_is_not(house: KeptHouse) -> None:
    """Two requests that begin alike are loaded in one batch."""
    one, two = Linked(house, 1), Linked(house, 2)
    one.store(CHAIN, range(6))
    assert lease(two, "r", CHAIN)
    assert lease(two, "s", CHAIN[:2])
    noise = [two.layer(layer, 10) for layer in range(LAYERS)]

    def look(layer: int) -> None:
        for number, target in ((0, 10), (5, 15), (0, 20), (1, 21)):
            assert torch.equal(two.layer(layer, target), one.layer(layer, number))
        if layer + 1 < LAYERS:
            assert torch.equal(two.layer(layer + 1, 10), noise[layer + 1])

    two.counter.at = look
    assert two.load({"r": wanted(CHAIN, range(10, 16)), "s": wanted(CHAIN[:2], [20, 21])})
    assert (two.counter.done, two.counter.failed) == ([0, 1, 2], [])
    assert house.leased() == 0
    two.counter.at = lambda layer: None
    assert lease(two, "t", CHAIN)
    assert two.load({"t": wanted(CHAIN[:4], range(4))}), "less than was leased is no error"


def test_a_lease_is_complete_when_all_that_is_needed_lies_in_host_memory(house: KeptHouse) -> None:
    one = Linked(house, 1)
    one.store(CHAIN[:4], range(4))
    assert not lease(one, "r", CHAIN)
    assert house.leased() == 4, "what is there stays leased for a while: the rest may come up from disk"
    assert lease(one, "r", CHAIN, needed=4)
    assert not lease(one, "other", hashes_of("x y"), needed=1)
    assert lease(one, "other", hashes_of("x y"), needed=0), "that it missed is all that there is to say"


def test_pages_are_brought_up_from_disk_for_the_next_request(disk_house: KeptHouse) -> None:
    house = disk_house
    one = Linked(house, 1)
    one.store(CHAIN, range(6))
    house.only_on_disk(6)
    assert not lease(one, "r", CHAIN), "it is not there yet"
    house.disk_goes_on()
    assert lease(one, "r", CHAIN)
    one.loads.close()
    assert house.leased() == 0


def test_leases_end_with_their_time_their_number_and_a_new_one(house: KeptHouse) -> None:
    one = Linked(house, 1)
    one.store(CHAIN, range(6))
    assert lease(one, "r", CHAIN)
    assert lease(one, "r", CHAIN[:2]), "the request's former lease ends"
    assert house.leased() == 2
    house.clock.advance(LEASE_S - 0.1)
    one.loads.tick()
    assert house.leased() == 2
    house.clock.advance(0.1)
    one.loads.tick()
    assert house.leased() == 0
    assert lease(one, "old", CHAIN)
    for number in range(LEASES_MAX):
        assert lease(one, f"r{number}", CHAIN[:1])
    assert house.leased() == 1


def invalidate(space: Space) -> None:
    """Slots change hands."""
    slot = next(slot for slot, _ in space.host_pool.resident())
    space.arena.invalidate(slot)


@pytest.mark.swallows("^RuntimeError: a leased page was not what it should be$")
def test_a_slot_that_changes_hands_fails_the_batch_before_its_last_layer(house: KeptHouse) -> None:
    one, two = Linked(house, 1), Linked(house, 2)
    one.store(CHAIN, range(6))
    assert lease(two, "r", CHAIN)
    two.counter.at = lambda layer: house.with_space(invalidate) if layer == 0 else None
    assert not two.load({"r": wanted(CHAIN, range(6))})
    assert two.counter.done == [0, 1]
    assert two.counter.failed == ["a leased page was not what it should be"]
    assert house.leased() == 0


def test_what_is_not_leased_is_not_accepted(house: KeptHouse) -> None:
    one = Linked(house, 1)
    one.store(CHAIN, range(6))
    accept = one.loads.accept
    assert not accept("r", wanted(CHAIN, range(10, 16)))
    assert lease(one, "r", CHAIN[:3])
    assert not accept("r", wanted(CHAIN[1:3], [10, 11])), "other pages than were leased"
    assert lease(one, "r", CHAIN)
    house.weights = b"others"
    assert not accept("r", wanted(CHAIN, range(10, 16))), "the weights have changed"
    house.weights = b"weights"
    assert lease(one, "r", CHAIN)
    house.clock.advance(LEASE_S)
    one.loads.tick()
    assert not accept("r", wanted(CHAIN, range(10, 16))), "its time is over"
    assert house.leased() == 0


def test_what_is_accepted_stays(house: KeptHouse) -> None:
    """Longer than a lease that nobody wants, beyond their number, and while the manager goes and another one comes."""
    one, two = Linked(house, 1), Linked(house, 2)
    one.store(CHAIN, range(6))
    assert lease(two, "r", CHAIN)
    assert two.loads.accept("r", wanted(CHAIN, range(6)))
    house.clock.advance(2 * LEASE_S)
    two.loads.tick()
    for number in range(LEASES_MAX + 1):
        lease(two, f"r{number}", CHAIN[:1])
    house.stop()
    house.serve()
    for _ in range(20):
        house.clock.advance(1.0)
        two.kept.tick()
    assert two.kept.held(CHAIN) == 0, "the next manager is not joined yet"
    assert run(two.loads.load(5, ["r"], two.counter, Event(3), lambda: False))
    assert all(torch.equal(two.layer(layer, 5), one.layer(layer, 5)) for layer in range(LAYERS))
    while not two.kept.descriptors():
        two.kept.tick()


def test_an_accepted_load_that_is_dropped_gives_everything_back(house: KeptHouse) -> None:
    one = Linked(house, 1)
    one.store(CHAIN, range(6))
    assert lease(one, "r", CHAIN)
    assert one.loads.accept("r", wanted(CHAIN, range(6)))
    one.loads.drop("r")
    assert house.leased() == 0
    manager = one.kept.manager()
    assert manager is not None
    assert manager.backend.stays == 0


def test_a_manager_that_went_and_came_back_has_other_memory(house: KeptHouse) -> None:
    one = Linked(house, 1)
    one.store(CHAIN, range(6))
    assert lease(one, "r", CHAIN)
    house.stop()
    house.serve()
    while not one.kept.descriptors():
        one.kept.tick()
    one.kept.tick()
    assert not one.loads.accept("r", wanted(CHAIN, range(6)))


@pytest.mark.swallows("^RuntimeError: device-side error$")
def test_a_copy_that_fails_counts_as_failed(house: KeptHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Linked(house, 1)
    one.store(CHAIN, range(6))
    assert lease(one, "r", CHAIN)
    begin = CpuCopier.begin_load

    def fails(copier: CpuCopier, pairs: Any, after: Any = None, layer: str | None = None) -> Any:
        if layer is not None and layer.endswith("1"):
            raise RuntimeError("device-side error")
        return begin(copier, pairs, after, layer)

    monkeypatch.setattr(CpuCopier, "begin_load", fails)
    assert not one.load({"r": wanted(CHAIN, range(6))})
    assert (one.counter.done, one.counter.failed) == ([0], ["device-side error"])
    assert house.leased() == 0
    assert house.served is not None
    metrics = house.served.metrics
    assert metrics.value("kvbm_failures_total", tier="host", kind="load") == 6
    assert metrics.value("kvbm_onboard_blocks_h2d") == 0


def test_the_device_of_the_pools_is_chosen() -> None:
    on_device_of({"kv": device_pages(1)})()
