"""Engines that move bytes themselves: their own keys, hits taken in parts, what became of stores, and `kvbm why`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import torch

import kvbm
from kvbm.admin_protocol import WhyQuery, WhyReply
from kvbm.block import BlockKey
from kvbm.client.admin import Admin
from kvbm.client.channel import readable_among
from kvbm.clock import ManualClock
from kvbm.hashing import EngineKeys
from kvbm.library import session as library_session
from kvbm.library.backend import Stored
from kvbm.manager.space import Space
from kvbm.settings import Settings
from kvbm.transfer import CpuCopier
from rigs.fake_tier import FakeMedium, FakeTier
from rigs.library import LocalHouse, SharedHouse, content, layout, new_cache
from rigs.served import DEADLINE_S

COPIED, HELD, REFUSED = Stored.COPIED, Stored.HELD, Stored.REFUSED
House = LocalHouse | SharedHouse


def keys_of(words: str) -> list[BlockKey]:
    """An engine's hashes of a chain: each covers the words up to its own."""
    said = words.split()
    return [BlockKey(hashlib.sha256(" ".join(said[: i + 1]).encode()).digest()) for i in range(len(said))]


KEYS = keys_of("a b c d e f")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedHouse]:
    house = SharedHouse(tmp_path)
    yield house
    house.close()


@pytest.fixture(params=[LocalHouse, SharedHouse])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    house: House = request.param(tmp_path)
    yield house
    house.close()


def why(house: SharedHouse, request: str) -> dict[str, Any]:
    """What an operator is told of a request."""
    assert house.served is not None
    with Admin(house.served.path, Settings()) as admin:
        reply = admin.ask(WhyQuery(request=request), WhyReply)
    (found,) = reply.requests
    return found


def until(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        meanwhile()


# ---- keys


def test_an_engines_own_keys_name_its_blocks_and_keep_their_chain(house: House) -> None:
    with house.open() as manager:
        cache, target = new_cache(1), new_cache(2)
        assert manager.offload(EngineKeys(KEYS[:3]), cache, range(3)) == 3
        assert manager.offload(EngineKeys(KEYS[3:], parent=KEYS[2]), cache, range(3, 6)) == 3
        absent = EngineKeys(keys_of("y z"), parent=keys_of("x")[0])
        assert manager.offload(absent, cache, range(2)) == 0, "behind a block that is nowhere"
        with manager.match(EngineKeys(KEYS)) as hit:
            assert (hit.blocks, hit.host) == (6, 6)
            assert hit.onboard(target, range(10, 16)) == 6
        assert torch.equal(content(target, range(10, 16)), content(cache, range(6)))
        with manager.match(EngineKeys(keys_of("a b x"))) as hit:
            assert hit.blocks == 2
        with manager.match(EngineKeys(KEYS), skip=4) as hit:
            assert hit.blocks == 2
        with (
            pytest.raises(kvbm.KvbmError, match="cover all extras"),
            manager.match(EngineKeys(KEYS), b"salt"),
        ):
            pass


def test_why_knows_the_request_its_prompt_and_what_shaped_its_keys(shared: SharedHouse) -> None:
    """The same prompt with another salt misses for that reason."""
    with shared.open() as manager:
        ours = EngineKeys(KEYS, request="r-1", prompt=b"p" * 16, extras=(("cache_salt", "s1"),))
        manager.offload(ours, new_cache(1), range(6))
        with manager.match(ours) as hit:
            assert hit.blocks == 6
        theirs = EngineKeys(keys_of("z b c"), "", "r-2", b"p" * 16, (("cache_salt", "s2"),))
        with manager.match(theirs) as hit:
            assert hit.blocks == 0
        unknown = EngineKeys(keys_of("y b c"), request="r-3", prompt=b"q" * 16)
        with manager.match(unknown) as hit:
            assert hit.blocks == 0
        assert (why(shared, "r-1")["host"], why(shared, "r-1")["missing"]) == (6, {})
        assert why(shared, "r-2")["missing"] == {"salt_changed": 3}
        assert why(shared, "r-2")["differs"] == ["cache_salt is s2 here, s1 there"]
        assert why(shared, "r-3")["missing"] == {"never_seen": 3}


def test_what_is_left_of_a_hit_is_counted_for_the_reason_that_was_given(shared: SharedHouse) -> None:
    with shared.open() as manager:
        cache = new_cache(1)
        manager.offload(EngineKeys(KEYS), cache, range(6))
        for request, reason, loaded in (
            ("a", "cost", 0),
            ("b", "deadline", 2),
            ("c", "", 5),
            ("d", "stale", 6),
        ):
            with manager.match(EngineKeys(KEYS, request=request)) as hit:
                if loaded:
                    assert hit.onboard(cache, range(10, 10 + loaded)) == loaded
                if reason:
                    hit.leave(reason)
        manager.status()  # answered after all that was said before
        found = [(why(shared, each)["loaded"], why(shared, each)["unloaded"]) for each in "abcd"]
        assert found == [
            (0, {"recompute_cheaper": 6}),
            (2, {"promotion_too_late": 4}),
            (5, {"unused": 1}),
            (6, {}),
        ]
        with manager.match(EngineKeys(KEYS)) as hit, pytest.raises(AssertionError):
            hit.leave("no such reason")


# ---- in parts


class Gated:
    """A house whose disk tier reads and writes only when a test lets it, with six blocks on disk and none in memory."""

    def __init__(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        self.house = house
        self.medium = FakeMedium(layout(), 40)
        self.tier = FakeTier(self.medium, pending_limit=40)
        for module in ("kvbm.manager.assembly", "kvbm.library.local"):
            monkeypatch.setattr(f"{module}.open_disk_tier", lambda *args, **options: self.tier)
        self.manager = house.open(host="1MB", disk="1MB")
        self.cache, self.target = new_cache(1), new_cache(2)
        self.manager.offload(EngineKeys(KEYS), self.cache, range(6))
        until(lambda: house.with_space(self._on_disk) == 6, self.goes_on)
        house.with_space(lambda space: space.clear("host"))

    def _on_disk(self, space: Space) -> int:
        assert space.disk is not None
        return len(list(space.disk.pool.resident()))

    def goes_on(self, blocks: int | None = None) -> None:
        """So many of the blocks that were asked for are read or written now."""
        self.house.with_space(lambda space: (space.pump(), self.tier.release(blocks), space.pump()))

    def corrupt(self, key: BlockKey) -> None:
        def flip(space: Space) -> None:
            assert space.disk is not None
            slot = space.disk.pool.find(key)
            assert slot is not None
            self.medium.corrupt(slot)

        self.house.with_space(flip)

    def close(self) -> None:
        self.manager.close()
        self.house.close()
        self.medium.close()


@pytest.fixture
def gated(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    gated = Gated(house, monkeypatch)
    yield gated
    gated.close()


def test_a_hit_is_taken_in_parts_as_it_comes_from_disk(gated: Gated) -> None:
    noise = content(gated.target, range(20, 24))
    with gated.manager.match(EngineKeys(KEYS, request="parts")) as hit:
        assert (hit.blocks, hit.host, hit.disk) == (6, 0, 6)
        assert hit.ready() == (0, True)
        gated.goes_on(2)
        until(lambda: hit.ready() == (2, True))
        assert hit.onboard(gated.target, [10, 11]) == 2
        assert torch.equal(content(gated.target, [10, 11]), content(gated.cache, [0, 1]))
        assert hit.ready() == (2, True)
        gated.goes_on()
        until(lambda: hit.ready() == (6, False))
        assert hit.onboard(gated.target, [14], first=2) == 1
        assert hit.onboard(gated.target, range(15, 18), first=3) == 3
        assert hit.onboard(gated.target, [20], first=6) == 0
        for wrong in (-1, 7):
            with pytest.raises(kvbm.SettingsError, match="first"):
                hit.onboard(gated.target, [20], first=wrong)
    assert torch.equal(content(gated.target, range(14, 18)), content(gated.cache, range(2, 6)))
    assert torch.equal(content(gated.target, range(20, 24)), noise)
    with pytest.raises(kvbm.KvbmError, match="no longer held"):
        hit.ready()
    assert gated.manager.metrics.value("kvbm_onboard_blocks_d2d") == 6
    if isinstance(gated.house, SharedHouse):
        assert (why(gated.house, "parts")["loaded"], why(gated.house, "parts")["unloaded"]) == (6, {})


def test_a_block_that_fails_its_check_ends_what_can_be_taken(gated: Gated) -> None:
    gated.corrupt(KEYS[4])
    with gated.manager.match(EngineKeys(KEYS, request="flipped")) as hit:
        gated.goes_on(2)
        until(lambda: hit.ready() == (2, True))
        assert hit.onboard(gated.target, [10, 11]) == 2
        noise = content(gated.target, [16, 17])
        gated.goes_on()
        until(lambda: hit.ready() == (4, False))
        assert hit.onboard(gated.target, range(14, 18), first=2) == 2
    assert torch.equal(content(gated.target, [14, 15]), content(gated.cache, [2, 3]))
    assert torch.equal(content(gated.target, [16, 17]), noise)


def test_a_part_waits_for_its_own_blocks_and_no_others(
    shared: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block comes each time the client waits."""
    gated, waits, wait = Gated(shared, monkeypatch), [0], library_session.Session.wait

    def waiting(session: library_session.Session, timeout_s: float) -> bool:
        waits[0] += 1
        gated.goes_on(1)
        return wait(session, timeout_s)

    with gated.manager.match(EngineKeys(KEYS)) as hit:
        monkeypatch.setattr(library_session.Session, "wait", waiting)
        assert hit.onboard(gated.target, range(10, 13)) == 3
        assert waits[0] == 3
        assert hit.onboard(gated.target, [13], first=3) == 1
        assert waits[0] == 4
        monkeypatch.undo()
        assert hit.ready() == (4, True)
    assert torch.equal(content(gated.target, range(10, 14)), content(gated.cache, range(4)))
    gated.close()


# ---- what became of a store


def test_every_block_that_was_to_be_kept_is_told_of(house: House) -> None:
    with house.open() as manager:
        cache = new_cache(1)
        assert manager.offload_each(EngineKeys(KEYS[:4]), cache, range(4)) == [COPIED] * 4
        assert manager.offload_each(EngineKeys(KEYS), cache, range(6)) == [HELD] * 4 + [COPIED] * 2
        assert manager.offload_each(EngineKeys(KEYS), cache, range(6)) == [HELD] * 6
        assert manager.offload_each(EngineKeys(keys_of("x y z")), cache, range(2)) == [COPIED] * 2
        assert manager.offload_each(EngineKeys([]), cache, []) == []
        orphans = EngineKeys(keys_of("p q r")[1:], parent=keys_of("p")[0])
        assert manager.offload_each(orphans, cache, range(2)) == [REFUSED] * 2, "their prefix is not kept"


def test_without_room_blocks_are_refused(house: House) -> None:
    with house.open(host=8 * layout().block_bytes) as manager:
        cache = new_cache(1)
        manager.offload(EngineKeys(KEYS), cache, range(6))
        with manager.match(EngineKeys(KEYS)) as hit:
            assert hit.blocks == 6
            longer = EngineKeys(keys_of("a b c d e f g h i j"))
            outcomes = manager.offload_each(longer, cache, range(10))
        assert outcomes == [HELD] * 6 + [COPIED] * 2 + [REFUSED] * 2


def test_without_a_manager_blocks_are_refused(shared: SharedHouse) -> None:
    with shared.open() as manager:
        shared.close()
        assert manager.offload_each(EngineKeys(KEYS), new_cache(1), range(6)) == [REFUSED] * 6


def test_what_another_client_is_storing_is_held(shared: SharedHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    store, outcomes = CpuCopier.store, list[list[Stored]]()
    with shared.open() as one, shared.connect() as two:

        def meanwhile(copier: CpuCopier, *arguments: Any) -> None:
            monkeypatch.undo()
            outcomes.append(two.offload_each(EngineKeys(KEYS), new_cache(2), range(6)))
            store(copier, *arguments)

        monkeypatch.setattr(CpuCopier, "store", meanwhile)
        outcomes.append(one.offload_each(EngineKeys(KEYS), new_cache(1), range(6)))
        assert outcomes == [[HELD] * 6, [COPIED] * 6]


# ---- between calls


def filling(space: Space) -> int:
    return space.host_pool.counts().filling


def test_a_client_that_calls_nothing_answers_fences(
    shared: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store took so long that it was given up: the slots are free once it has said that nothing writes there."""
    clock, store = ManualClock(100.0), CpuCopier.store
    with shared.open(clock=clock) as manager:

        def slow(copier: CpuCopier, *arguments: Any) -> None:
            store(copier, *arguments)
            clock.advance(3600.0)
            until(lambda: readable_among(manager.descriptors(), 0.05))

        monkeypatch.setattr(CpuCopier, "store", slow)
        manager.offload(EngineKeys(KEYS), new_cache(1), range(6))
        assert shared.with_space(filling) == 6
        manager.refresh()
        until(lambda: shared.with_space(filling) == 0)
        with manager.match(EngineKeys(KEYS)) as hit:
            assert hit.blocks == 0


def test_a_manager_that_goes_is_noticed_and_the_next_one_joined_between_calls(shared: SharedHouse) -> None:
    manager = shared.open()
    assert len(manager.descriptors()) == 2
    manager.refresh()
    assert not readable_among(manager.descriptors(), 0.0)
    shared.close()
    assert readable_among(manager.descriptors(), DEADLINE_S)
    manager.refresh()
    assert manager.descriptors() == ()
    shared.open().close()
    assert shared.served is not None
    until(manager.descriptors, manager.refresh)
    joined = shared.served.ask(lambda server: server.engine_count)
    assert joined >= 1
    assert manager.offload(EngineKeys(KEYS), new_cache(1), range(6)) == 6
    manager.close()
