"""Pages at a real manager: what an answer named is read as it was, whatever else happens in between."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="pages are torch tensors; torch is not installed")

import torch

from kvbm.errors import KvbmError
from kvbm.sglang_integration import pages_kept
from kvbm.sglang_integration.pages_kept import ARRIVAL_S, HIT_S, HITS_MAX, SHAPES_S, STORED_AT_ONCE
from rigs.kept_pages import KeptHouse, hashes_of, run, same, store
from rigs.sglang_pools import HostPool

CHAIN = hashes_of("a b c d e f")
FORK = hashes_of("a b c x y z")


# ---- reads


@pytest.mark.parametrize("zero_copy", [True, False])
def test_pages_come_back_as_they_were_kept_also_in_another_engine(house: KeptHouse, zero_copy: bool) -> None:
    pool, other = HostPool(zero_copy=zero_copy), HostPool(zero_copy=zero_copy)
    first, second = house.pool(pool), house.pool(other)
    assert store(first, CHAIN, [3, 0, 5, 7, 1, 2]) == [True] * 6
    assert store(second, CHAIN, [0, 1, 2, 3, 4, 5]) == [True] * 6, "they are held already"
    assert (first.counts.stored, second.counts.stored) == (6, 0)
    for buffer in other.buffers:
        buffer.zero_()
    assert second.held([*CHAIN, "00" * 32]) == 6
    assert run(second.load(CHAIN[:4], [8, 6, 4, 2])) == [True] * 4
    assert same(pool, [3, 0, 5, 7], other, [8, 6, 4, 2])
    assert run(second.load(CHAIN[4:], [9, 10])) == [True] * 2
    assert same(pool, [1, 2], other, [9, 10])
    assert not other.page(11).any(), "nothing else was written"
    assert (second.counts.asked, second.counts.found, second.counts.loaded) == (7, 6, 6)


def test_a_chain_that_begins_like_a_later_answers_gets_its_own_pages(house: KeptHouse) -> None:
    """The later answer names the same first pages, and others behind them."""
    pool, target = HostPool(), HostPool()
    kept = house.pool(pool)
    store(kept, CHAIN, [0, 1, 2, 3, 4, 5])
    store(kept, FORK, [0, 1, 2, 6, 7, 8])
    reader = house.pool(target)
    assert reader.held(CHAIN) == 6
    assert reader.held(FORK) == 6
    assert run(reader.load(CHAIN, [6, 7, 8, 9, 10, 11])) == [True] * 6
    assert same(pool, [0, 1, 2, 3, 4, 5], target, [6, 7, 8, 9, 10, 11])
    assert run(reader.load(FORK, [0, 1, 2, 3, 4, 5])) == [True] * 6
    assert same(pool, [0, 1, 2, 6, 7, 8], target, [0, 1, 2, 3, 4, 5])
    assert house.leased() == 0


def test_pages_that_do_not_follow_one_another_are_found_by_their_names(house: KeptHouse) -> None:
    """A recurrent pool has a page here and there."""
    pool, target = HostPool(), HostPool()
    kept, reader = house.pool(pool, chained=False), house.pool(target, chained=False)
    store(kept, CHAIN, [0, 1, 2, 3, 4, 5])
    assert reader.held(CHAIN) == 6
    assert run(reader.load([CHAIN[1], CHAIN[4]], [10, 11])) == [True] * 2
    assert same(pool, [1, 4], target, [10, 11])
    while not reader.mirror.complete:
        reader.tick()
    assert reader.each_held([CHAIN[4], "11" * 32, CHAIN[0]]) == [True, False, True]
    assert house.leased() == 6, "the answer before is leased, and nothing else"


def test_a_suffix_is_read_without_a_question(house: KeptHouse) -> None:
    pool, target = HostPool(), HostPool()
    store(house.pool(pool), CHAIN, range(6))
    reader = house.pool(target)
    assert run(reader.load(CHAIN[2:], [8, 9, 10, 11])) == [True] * 4
    assert same(pool, [2, 3, 4, 5], target, [8, 9, 10, 11])
    assert house.leased() == 0, "it was leased for that alone"
    assert run(reader.load([*CHAIN[4:], "22" * 32], [0, 1, 2])) == [True, True, False]
    assert run(reader.load([], [])) == []


def test_prefixes_that_are_told_are_not_looked_for(house: KeptHouse) -> None:
    store(house.pool(), CHAIN, range(6))
    reader = house.pool()
    assert reader.held(CHAIN[2:], CHAIN[:2]) == 4
    assert house.leased() == 4
    assert run(reader.load(CHAIN[2:], [8, 9, 10, 11])) == [True] * 4


# ---- leases


def test_what_an_answer_named_is_leased_until_it_was_read_or_some_time_has_passed(house: KeptHouse) -> None:
    kept = house.pool()
    store(kept, CHAIN, range(6))
    assert kept.held(CHAIN) == 6
    assert house.leased() == 6
    assert run(kept.load(CHAIN[:2], [6, 7])) == [True] * 2
    assert house.leased() == 6, "there is more to read"
    house.clock.advance(HIT_S - 0.1)
    kept.tick()
    assert house.leased() == 6
    house.clock.advance(0.1)
    kept.tick()
    assert house.leased() == 0
    assert kept.held(CHAIN) == 6
    house.clock.advance(HIT_S - 0.1)
    assert run(kept.load(CHAIN[:2], [6, 7])) == [True] * 2
    house.clock.advance(HIT_S - 0.1)
    kept.tick()
    assert house.leased() == 6, "whoever reads goes on"
    assert run(kept.load(CHAIN[2:], [8, 9, 10, 11])) == [True] * 4
    assert house.leased() == 0


def test_answers_are_bounded_the_oldest_is_given_back(house: KeptHouse) -> None:
    kept = house.pool()
    chains = [hashes_of(str(i)) for i in range(3)]
    for i, chain in enumerate(chains):
        store(kept, chain, [i])
    assert kept.held(chains[0]) == 1
    for _ in range(HITS_MAX - 1):
        assert kept.held(chains[1]) == 1
    assert house.leased() == 2
    assert kept.held(chains[2]) == 1
    assert house.leased() == 2, "that of the first chain is no longer leased"


def test_what_is_leased_is_not_evicted(house: KeptHouse) -> None:
    pool, target = HostPool(), HostPool()
    kept, reader = house.pool(pool), house.pool(target)
    store(kept, CHAIN, range(6))
    assert reader.held(CHAIN) == 6
    for i in range(12):
        store(kept, hashes_of(f"other{i} more"), [6, 7])
    assert run(reader.load(CHAIN, [6, 7, 8, 9, 10, 11])) == [True] * 6
    assert same(pool, range(6), target, [6, 7, 8, 9, 10, 11])


# ---- disk


def test_a_read_waits_for_pages_that_come_from_disk_and_keeps_its_lease(disk_house: KeptHouse) -> None:
    """Whatever others ask meanwhile, and though somebody clears."""
    house, pool, target = disk_house, HostPool(), HostPool()
    kept, reader = house.pool(pool), house.pool(target)
    store(kept, CHAIN, range(6))
    house.only_on_disk(6)
    assert reader.held(CHAIN) == 6
    reading = reader.load(CHAIN, [6, 7, 8, 9, 10, 11])
    next(reading)
    reader._hits[0].until_s = house.clock()  # its time without a read is over
    house.clock.advance(ARRIVAL_S - 1.0)
    reader.tick()
    for _ in range(HITS_MAX + 1):
        reader.held(CHAIN[:1])
    reader.clear()
    assert run(reading, house.disk_goes_on) == [True] * 6
    assert same(pool, range(6), target, [6, 7, 8, 9, 10, 11])
    assert house.leased() == 0


def test_two_reads_of_one_answer_do_not_end_one_another(disk_house: KeptHouse) -> None:
    house, pool, target = disk_house, HostPool(), HostPool()
    kept, reader = house.pool(pool), house.pool(target)
    store(kept, CHAIN, range(6))
    house.only_on_disk(6)
    assert reader.held(CHAIN) == 6
    one, two = reader.load(CHAIN, range(6)), reader.load(CHAIN, range(6, 12))
    next(one)
    next(two)
    assert run(one, house.disk_goes_on) == [True] * 6
    assert run(two) == [True] * 6
    assert same(pool, range(6), target, range(6, 12))
    assert house.leased() == 0


def test_a_read_that_is_given_up_writes_nothing_and_holds_nothing(disk_house: KeptHouse) -> None:
    house, target = disk_house, HostPool()
    store(house.pool(), CHAIN, range(6))
    house.only_on_disk(6)
    reader, before = house.pool(target), target.page(6)
    reading = reader.load(CHAIN, [6, 7, 8, 9, 10, 11])
    next(reading)
    reading.close()
    for _ in range(3):
        house.disk_goes_on()
    assert house.leased() == 0
    assert torch.equal(target.page(6), before)


def test_pages_that_do_not_come_in_time_are_misses(disk_house: KeptHouse) -> None:
    house = disk_house
    store(house.pool(), CHAIN, range(6))
    house.only_on_disk(6)
    reader = house.pool()
    reading = reader.load(CHAIN, range(6))
    next(reading)
    found = run(reading, lambda: house.clock.advance(pages_kept.ARRIVAL_S))
    assert found == [False] * 6


# ---- weights


def test_other_weights_find_nothing_and_unknown_ones_neither_find_nor_keep(house: KeptHouse) -> None:
    kept = house.pool()
    assert store(kept, CHAIN, range(6)) == [True] * 6
    assert kept.held(CHAIN) == 6
    house.weights = b"others"
    assert kept.held(CHAIN) == 0
    assert run(kept.load(CHAIN, range(6))) == [False] * 6, "also not out of the answer before"
    house.weights = None
    assert kept.held(CHAIN) == 0
    assert run(kept.load(CHAIN, range(6))) == [False] * 6
    assert store(kept, FORK, range(6)) == [False] * 6
    assert kept.keys(CHAIN) is None
    house.weights = b"weights"
    assert kept.held(FORK) == 3


def test_weights_that_change_in_the_middle_of_a_store_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = 2 * STORED_AT_ONCE
    house = KeptHouse(tmp_path, monkeypatch, host_blocks=2 * pages)
    kept, chain = house.pool(HostPool(pages=pages)), hashes_of(" ".join(map(str, range(pages))))
    storing = kept.store(chain, range(pages))
    next(storing)
    house.weights = b"others"
    assert run(storing) == [True] * STORED_AT_ONCE + [False] * STORED_AT_ONCE
    assert kept.held(chain) == 0
    house.weights = b"weights"
    assert kept.held(chain) == STORED_AT_ONCE
    house.close()


def test_weights_that_change_in_the_middle_of_a_read_end_it(disk_house: KeptHouse) -> None:
    house = disk_house
    target = HostPool()
    store(house.pool(), CHAIN, range(6))
    house.only_on_disk(6)
    reader, before = house.pool(target), target.page(6)
    reading = reader.load(CHAIN, range(6, 12))
    next(reading)
    house.weights = b"others"
    assert run(reading, house.disk_goes_on) == [False] * 6
    assert torch.equal(target.page(6), before)


# ---- stores that are refused, managers that are not there


def test_a_store_that_finds_no_room_ends_and_says_so(house: KeptHouse) -> None:
    pool = HostPool(pages=24)
    kept = house.pool(pool)
    full = hashes_of(" ".join(map(str, range(16))))
    assert store(kept, full, range(16)) == [True] * 16
    assert kept.held(full) == 16, "all that there is room for is leased"
    assert store(kept, CHAIN, range(6)) == [False] * 6
    assert kept.counts.stored == 16


def test_a_store_waits_for_room_that_comes(house: KeptHouse) -> None:
    pool = HostPool(pages=24)
    kept = house.pool(pool)
    full = hashes_of(" ".join(map(str, range(16))))
    assert store(kept, full, range(16)) == [True] * 16
    assert kept.held(full) == 16, "all that there is room for is leased"
    waits: list[int] = []

    def meanwhile() -> None:
        waits.append(1)
        house.clock.advance(0.05)
        if len(waits) == 2:
            kept._drop_all()

    assert run(kept.store(CHAIN, range(6)), meanwhile) == [True] * 6
    assert len(waits) >= 2


def test_a_store_waits_until_it_is_known_what_computes(house: KeptHouse) -> None:
    kept = house.pool()
    house.weights, house.weights_coming = None, True

    def come() -> None:
        house.weights, house.weights_coming = b"weights", False

    assert run(kept.store(CHAIN, range(6)), come) == [True] * 6
    house.weights, house.weights_coming = None, True
    begun_s = house.clock()
    assert run(kept.store(FORK, range(6)), lambda: house.clock.advance(0.5)) == [False] * 6
    assert house.clock() - begun_s <= SHAPES_S + 0.5
    house.weights_coming = False
    assert run(kept.store(FORK, range(6))) == [False] * 6, "it will never be known"


def test_pages_that_are_given_to_others_are_stored_no_further(house: KeptHouse) -> None:
    kept = house.pool(HostPool(pages=24))
    chain = hashes_of(" ".join(map(str, range(16))))
    kept.pages.batch = 4
    parts: list[int] = []
    stored = run(kept.store(chain, range(16), valid=lambda: len(parts) < 2), lambda: parts.append(1))
    assert stored == [True] * 8 + [False] * 8


def test_waiting_in_vain_for_room_costs_less_each_time(house: KeptHouse) -> None:
    kept = house.pool(HostPool(pages=24))
    full = hashes_of(" ".join(map(str, range(16))))
    store(kept, full, range(16))
    kept.held(full)
    waited = []
    for _ in range(4):
        begun_s = house.clock()
        run(kept.store(CHAIN, range(6)), lambda: house.clock.advance(0.001))
        waited.append(house.clock() - begun_s)
    assert waited == sorted(waited, reverse=True)
    assert waited[-1] < 0.05 < waited[0]


def test_a_flat_page_is_filled_by_whoever_has_it(house: KeptHouse) -> None:
    pool, target = HostPool(zero_copy=False), HostPool(zero_copy=False)
    kept, reader = house.pool(pool), house.pool(target)
    staged, flat = kept.pages, [pool.page(i).flatten() for i in range(3)]
    fill = lambda row, position: staged.fill(row, flat[position])  # type: ignore[attr-defined]  # noqa: E731
    assert run(kept.store(CHAIN[:3], range(3), fill=fill)) == [True] * 3
    got: list[int] = []
    assert run(reader.load(CHAIN[:3], range(3), got.extend)) == [True] * 3
    assert got == [0, 1, 2]
    assert torch.equal(reader.pages.flat(2), flat[2])  # type: ignore[attr-defined]


def test_a_manager_that_comes_goes_and_comes_back_costs_misses_alone(
    house: KeptHouse, caplog: pytest.LogCaptureFixture
) -> None:
    house.stop()
    kept = house.pool()
    assert kept.held(CHAIN) == 0
    assert store(kept, CHAIN, range(6)) == [False] * 6
    assert (house.joined, kept.clear(), kept.descriptors()) == (1, 0, ())
    for _ in range(20):
        house.clock.advance(1.0)
        kept.held(CHAIN)
    assert house.joined < 10, "it is not tried at every call"
    assert sum("no KV cache for now" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(KvbmError):
        kept.join()
    house.serve()
    house.clock.advance(5.0)
    assert store(kept, CHAIN, range(6)) == [True] * 6
    assert kept.held(CHAIN) == 6
    assert len(kept.descriptors()) == 2
    house.stop()
    assert run(kept.load(CHAIN, range(6))) == [True] * 6, "its memory is still what it was"
    assert kept.held(CHAIN) == 0
    assert store(kept, FORK, range(6)) == [False] * 6
    assert kept.clear() == 0
    kept.tick()
    house.serve()
    while not kept.descriptors():
        kept.tick()
    assert store(kept, CHAIN, range(6)) == [True] * 6


def test_clearing_drops_what_nobody_else_uses(house: KeptHouse) -> None:
    kept = house.pool()
    store(kept, CHAIN, range(6))
    kept.held(CHAIN)
    assert kept.clear() == 6, "its own answers do not count"
    assert kept.held(CHAIN) == 0
