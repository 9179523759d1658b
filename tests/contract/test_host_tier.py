"""The host tier keeps the guarantees of a tier: the public kit on the arena, ranks in processes, a space on it.

Read is always through a second mapping of the arena's descriptors, as ranks have it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import random
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contract import host_child
from contract.host_arena_tier import HostArenaTier, RankMapping
from kvbm.block import BlockKey
from kvbm.clock import ManualClock
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll
from kvbm.testing.stored_runs import LAYOUT, make_key
from kvbm.testing.tier_contract import TierContract
from kvbm.tiers.host import GENERATION_BYTES, HostArena

DEADLINE_S = 60.0
SLOT_COUNT = 6


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Closing releases everything: a test leaves no mapping and no descriptor of an arena behind in this process."""
    before = host_child.traces()
    yield
    if host_child.traces() > before:
        gc.collect()
    assert host_child.traces() <= before


class TestHostArena(TierContract):
    """All of the contract but recovery: memory does not outlive its process."""

    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> HostArenaTier:
        return HostArenaTier(layout, slot_count, pending_limit)


class TestHostArenaOneShard(TestHostArena):
    layout = BlockLayout(block_tokens=64, shard_bytes=4096, shard_count=1)


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(LAYOUT, SLOT_COUNT)
    yield arena
    arena.close()


def fill(arena: HostArena, slot: int, shard: int, text: str) -> str:
    """Put the bytes of the text there; their digest."""
    content = host_child.make_bytes(text, LAYOUT.shard_bytes)
    views = arena.slot_views(slot)
    views[shard][: len(content)] = content
    for view in views:
        view.release()
    return host_child.digest(content)


def peek(arena: HostArena, slot: int, shard: int) -> str:
    """The digest of what lies there."""
    views = arena.slot_views(slot)
    content = bytes(views[shard][: LAYOUT.shard_bytes])
    for view in views:
        view.release()
    return host_child.digest(content)


class Rank:
    """A rank of that shard in a process of its own."""

    def __init__(self, arena: HostArena, shard: int, taken: str) -> None:
        fds = [os.dup(arena.region_fds[shard]), os.dup(arena.generation_fd)]
        numbers = [*fds, arena.slot_count, LAYOUT.shard_bytes]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(host_child.__file__)), taken, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        for fd in fds:
            os.close(fd)

    def ask(self, *words: object) -> str:
        """One command; its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], DEADLINE_S)[0], f"no answer to {words}"
        return self._process.stdout.readline().decode().strip()

    def end(self) -> int:
        """Let it end; its exit code."""
        self._process.communicate(timeout=DEADLINE_S)
        return self._process.returncode


@pytest.fixture(params=["open_arena", "mapping"])
def join(request: pytest.FixtureRequest) -> Iterator[Callable[[HostArena, int], Rank]]:
    """Starts ranks, with the bare mapping or with the worker's own; all of them must end well."""
    if request.param == "mapping" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    ranks: list[Rank] = []

    def start(arena: HostArena, shard: int) -> Rank:
        ranks.append(Rank(arena, shard, request.param))
        return ranks[-1]

    yield start
    assert [rank.end() for rank in ranks] == [0] * len(ranks)


Join = Callable[[HostArena, int], Rank]


def test_ranks_in_other_processes_find_the_bytes_of_their_shard(arena: HostArena, join: Join) -> None:
    ranks = [join(arena, shard) for shard in range(LAYOUT.shard_count)]
    for slot in range(SLOT_COUNT):
        for shard, rank in enumerate(ranks):
            stored = fill(arena, slot, shard, f"{slot}-{shard}")
            assert rank.ask("read", slot, arena.generation(slot)) == stored
    for slot in reversed(range(SLOT_COUNT)):
        for shard, rank in enumerate(ranks):
            assert rank.ask("write", slot, f"back-{slot}-{shard}") == "written"
    for slot in range(SLOT_COUNT):
        for shard in range(LAYOUT.shard_count):
            content = host_child.make_bytes(f"back-{slot}-{shard}", LAYOUT.shard_bytes)
            assert peek(arena, slot, shard) == host_child.digest(content)


def test_a_rank_in_another_process_notices_that_a_slot_changed_hands(arena: HostArena, join: Join) -> None:
    rank = join(arena, 1)
    stored = fill(arena, 2, 1, "old")
    promised = arena.generation(2)
    assert rank.ask("read", 2, promised) == stored
    arena.invalidate(2)
    assert rank.ask("read", 2, promised) == "changed"
    stored = fill(arena, 2, 1, "new")
    assert rank.ask("read", 2, promised) == "changed", "the bytes are whole, and those of another block"
    assert rank.ask("read", 2, arena.generation(2)) == stored
    assert rank.ask("read", 3, promised) == rank.ask("read", 3, arena.generation(3)), "others are untouched"


def test_a_promise_of_one_life_fits_no_slot_of_another(arena: HostArena, join: Join) -> None:
    later = HostArena(LAYOUT, SLOT_COUNT)
    rank = join(later, 0)
    assert {rank.ask("read", slot, arena.generation(slot)) for slot in range(SLOT_COUNT)} == {"changed"}
    later.close()


def test_a_rank_keeps_its_memory_when_the_manager_closes_and_drops_all_of_it(join: Join) -> None:
    before = host_child.traces()
    arena = HostArena(LAYOUT, SLOT_COUNT)
    rank = join(arena, 0)
    stored, generation = fill(arena, 4, 0, "kept"), arena.generation(4)
    assert rank.ask("read", 4, generation) == stored  # mapped by now
    arena.close()
    assert host_child.traces() == before
    assert rank.ask("read", 4, generation) == stored
    assert rank.ask("close") == "0"


def test_it_never_takes_more_than_its_size(arena: HostArena) -> None:
    """Every byte of every slot written: not one page beyond them."""
    for slot in range(SLOT_COUNT):
        for view in arena.slot_views(slot):
            view[:] = b"\xff" * LAYOUT.slot_bytes
            view.release()
    for fd in arena.region_fds:
        status = os.fstat(fd)
        assert status.st_size == SLOT_COUNT * LAYOUT.slot_bytes
        assert status.st_blocks * 512 <= status.st_size
    assert os.fstat(arena.generation_fd).st_size == SLOT_COUNT * GENERATION_BYTES
    rank = RankMapping.of(arena, 0)
    assert len(rank.region) == SLOT_COUNT * LAYOUT.slot_bytes
    with pytest.raises(IndexError):
        rank.intact(SLOT_COUNT, 0)
    rank.close()


class Traffic:
    """A space of host memory alone, stored to and looked up at random; promises are kept beyond their leases."""

    def __init__(self, arena: HostArena) -> None:
        self.chance = random.Random(1)
        self.clock = ManualClock()
        self.space = Space(LAYOUT, arena, None, AdmitAll(), Metrics(), self.clock, lambda lease: None)
        self.ranks = [RankMapping.of(arena, shard) for shard in range(LAYOUT.shard_count)]
        self.promises: list[tuple[BlockKey, int, int]] = []
        self.counts: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        for number in range(1, steps + 1):
            self.clock.advance(0.01)
            key = make_key(self.chance.randrange(4 * SLOT_COUNT))
            self._store(number, key)
            self._look_up(number, key)
            for promise in self.chance.sample(self.promises, min(4, len(self.promises))):
                self.counts[self._check(*promise)] += 1
            self.space.check()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.space.close(keep=False)

    def _store(self, number: int, key: BlockKey) -> None:
        (slot,) = self.space.reserve(1, number, None, [key])
        if slot >= 0:
            for shard, rank in enumerate(self.ranks):
                rank.write(slot, self._content(key, shard))
            self.space.commit(1, number)

    def _look_up(self, number: int, key: BlockKey) -> None:
        """A leased block stays where it is; its promise may outlive the lease."""
        lease = self.space.lookup(1, number, [key], 0)
        assert lease is not None
        promise = (key, lease.slots[0], self.space.arena.generation(lease.slots[0]))
        assert self._check(*promise) == "right"
        self.space.release(1, number)
        self.promises = [*self.promises[-20:], promise]

    def _check(self, key: BlockKey, slot: int, generation: int) -> str:
        if not self.ranks[0].intact(slot, generation):
            return "noticed"
        right = all(rank.read(slot) == self._content(key, i) for i, rank in enumerate(self.ranks))
        return "right" if right and self.ranks[0].intact(slot, generation) else "wrong"

    def _content(self, key: BlockKey, shard: int) -> bytes:
        return hashlib.shake_128(key + bytes([shard])).digest(LAYOUT.slot_bytes)


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    traffic = Traffic(HostArena(LAYOUT, SLOT_COUNT))
    yield traffic
    traffic.close()


def test_what_a_space_promised_is_right_or_noticed(traffic: Traffic) -> None:
    traffic.run(500)
    assert traffic.counts["wrong"] == 0
    assert min(traffic.counts["right"], traffic.counts["noticed"]) > 100, traffic.counts


def test_without_generations_wrong_bytes_would_be_taken(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a slot that changes hands in silence."""
    monkeypatch.setattr(traffic.space.arena, "invalidate_all", lambda slots: None)
    traffic.run(500)
    assert traffic.counts["wrong"] > 100, traffic.counts
