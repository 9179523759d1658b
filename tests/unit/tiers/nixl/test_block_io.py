"""A driver that refuses, fails, lies or never ends: an error at start, or a tier that is off; never wrong bytes."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.block import Outcome, SlotIndex
from kvbm.clock import ManualClock
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.disk_health import HEAL_S_MAX
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll
from kvbm.testing.stored_runs import (
    LAYOUT,
    NAMESPACE,
    RunMemory,
    by_slot,
    collect,
    heal,
    load,
    load_run,
    make_key,
    outcomes,
    store,
    store_run,
)
from kvbm.testing.tier_contract import PersistentTierContract
from kvbm.tiers.disk.block_io import CHECKSUM_FIELD, DirectRefused
from kvbm.tiers.disk.survey import verify_directory
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from kvbm.tiers.host import HostArena
from kvbm.tiers.nixl.agent import NixlAgent
from kvbm.tiers.nixl.block_io import NixlBlockIo
from rigs.nixl_model import HostMemory, ModelAgent

SLOT_COUNT = 6
LIMIT_S = 0.1
PATIENCE_S = 5.0
"""Far above the limit, far below a hang."""


def open_tier(root: Path, agent: ModelAgent, backend: str = "GDS_MT", **more: object) -> DiskTier:
    io = NixlBlockIo(backend, agent, HostMemory(), LIMIT_S)
    return open_disk_tier(root, LAYOUT, NAMESPACE, capacity_blocks=SLOT_COUNT, io_threads=2, io=io, **more)  # type: ignore[arg-type]


class TestModelledTier(PersistentTierContract):
    """The contract where NIXL is not installed."""

    def make_tier(self, tmp_path, slot_count, layout, namespace, pending_limit):  # type: ignore[no-untyped-def]
        return open_disk_tier(
            tmp_path,
            layout,
            namespace,
            capacity_blocks=slot_count,
            io_threads=2,
            pending_limit=pending_limit,
            io=NixlBlockIo("GDS_MT", ModelAgent(), HostMemory()),
        )


@pytest.fixture
def agent() -> ModelAgent:
    return ModelAgent()


@pytest.fixture
def tier(tmp_path: Path, agent: ModelAgent) -> Iterator[DiskTier]:
    tier = open_tier(tmp_path, agent)
    yield tier
    agent.finish()
    tier.close(keep=False)


@pytest.mark.parametrize("segment", ["DRAM", "FILE"])
def test_a_refused_registration_is_an_error_at_start(tmp_path: Path, agent: ModelAgent, segment: str) -> None:
    agent.refused = (segment,)  # type: ignore[assignment]
    with pytest.raises(DirectRefused, match=r"GDS_MT refused the registration of (memory|files)"):
        open_tier(tmp_path, agent)
    assert agent.registered == []
    assert os.listdir(tmp_path) == [], "what was made for it is gone again"


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("lies", "wrote other bytes than it was given"),
        ("error", "moved no page"),
        ("refused", "moved no page"),
        ("endless", "moved no page"),
    ],
)
def test_a_registration_that_moves_nothing_right_is_an_error_at_start(
    tmp_path: Path, agent: ModelAgent, fate: str, words: str
) -> None:
    agent.fate = fate
    start_s = time.monotonic()
    with pytest.raises(DirectRefused, match=words):
        open_tier(tmp_path, agent)
    assert time.monotonic() - start_s < PATIENCE_S


def test_the_page_cache_in_between_is_an_error_at_start(tmp_path: Path, agent: ModelAgent) -> None:
    with pytest.raises(DirectRefused, match="O_DIRECT"):
        open_tier(tmp_path, agent, o_direct=False)


def test_no_nixl_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.tiers.nixl.package.PACKAGES", ("no_such_package",))
    with pytest.raises(DirectRefused, match=r"NIXL is not installed; pip install 'openkvbm\[nixl-cu12\]'"):
        NixlAgent("GDS_MT", {})


def test_a_load_that_never_ends_turns_the_tier_off(tier: DiskTier, agent: ModelAgent) -> None:
    store(tier, LAYOUT, make_key(1), 1)
    store(tier, LAYOUT, make_key(2), 2)
    agent.fate = "endless"
    start_s = time.monotonic()
    completion = load(tier, LAYOUT, make_key(1), 1)
    assert time.monotonic() - start_s < PATIENCE_S
    assert (completion.outcome, completion.still_in_use) == (Outcome.RETRY, True)
    assert "did not end in 0.1 s" in tier.fault
    assert load(tier, LAYOUT, make_key(2), 2).outcome is Outcome.RETRY
    agent.fate = "done"
    assert not heal(tier), "the device may still write"
    agent.finish()
    assert heal(tier)
    assert sorted(by_slot(tier.recovered())) == [1, 2]
    assert load(tier, LAYOUT, make_key(1), 1).outcome is Outcome.HIT
    assert agent.transfers == []


def test_a_store_that_never_ends_leaves_nothing_to_find(tier: DiskTier, agent: ModelAgent) -> None:
    store(tier, LAYOUT, make_key(1), 1)
    agent.fate = "endless"
    assert store(tier, LAYOUT, make_key(2), 1).outcome is Outcome.RETRY
    agent.fate = "done"
    agent.finish()
    assert heal(tier)
    assert list(tier.recovered()) == []


def test_many_that_never_end_end_within_a_limit_or_two(tier: DiskTier, agent: ModelAgent) -> None:
    store(tier, LAYOUT, make_key(1), 1)
    agent.fate = "endless"
    targets = [RunMemory(LAYOUT) for _ in range(8)]
    agent.may_begin.clear()
    for job, target in enumerate(targets):
        assert tier.submit_load(job, [make_key(1)], SlotIndex(1), target.views) is Outcome.PENDING
    agent.may_begin.set()
    assert {c.outcome for c in collect(tier, 8, PATIENCE_S).values()} == {Outcome.RETRY}


def test_closing_over_a_transfer_that_never_ends_waits_for_nothing(tmp_path: Path, agent: ModelAgent) -> None:
    tier = open_tier(tmp_path, agent)
    store(tier, LAYOUT, make_key(1), 1)
    agent.fate = "endless"
    load(tier, LAYOUT, make_key(1), 1)
    start_s = time.monotonic()
    tier.close(keep=True)
    assert time.monotonic() - start_s < PATIENCE_S
    assert set(agent.transfers) == {kept[0] for kept in agent.leaked[1:]}, "nobody frees what is under way"
    assert agent.registered, "nor takes its memory from it"


def test_an_error_is_an_error_of_the_medium(tier: DiskTier, agent: ModelAgent) -> None:
    store(tier, LAYOUT, make_key(1), 1)
    store(tier, LAYOUT, make_key(2), 2)
    agent.fate = "error"
    assert load(tier, LAYOUT, make_key(1), 1).outcome is Outcome.RETRY
    assert "EIO" in tier.fault
    assert "ended as ERR" in tier.fault
    agent.fate = "done"
    assert heal(tier)
    assert sorted(by_slot(tier.recovered())) == [2], "what could not be read is not tried for ever"


def test_what_could_not_begin_keeps_the_tier_off(tmp_path: Path, agent: ModelAgent) -> None:
    """It may sit in a queue of the driver's; nobody can say when it has left it."""
    tier = open_tier(tmp_path, agent)
    store(tier, LAYOUT, make_key(1), 1)
    agent.fate = "refused"
    assert load(tier, LAYOUT, make_key(1), 1).outcome is Outcome.RETRY
    agent.fate = "done"
    assert not heal(tier)
    tier.close(keep=True)
    assert agent.leaked


@pytest.mark.parametrize("fate", ["lies", "done"])
def test_a_driver_that_brings_other_bytes_is_a_miss(tier: DiskTier, agent: ModelAgent, fate: str) -> None:
    store(tier, LAYOUT, make_key(1), 1)
    agent.fate = fate
    loaded = load(tier, LAYOUT, make_key(1), 1)
    expected = (Outcome.MISS, True) if fate == "lies" else (Outcome.HIT, False)
    assert (loaded.outcome, loaded.corrupt) == expected
    assert tier.fault == ""


def test_a_driver_that_writes_other_bytes_is_a_miss_later(tier: DiskTier, agent: ModelAgent) -> None:
    agent.fate = "lies"
    assert store(tier, LAYOUT, make_key(1), 1).outcome is Outcome.HIT
    agent.fate = "done"
    assert load(tier, LAYOUT, make_key(1), 1).corrupt


def test_a_flipped_bit_on_disk_is_a_miss(tier: DiskTier) -> None:
    assert tier.path is not None
    for slot in range(3):
        store(tier, LAYOUT, make_key(slot), slot)
    assert verify_directory(tier.path).verified == 3
    flip(tier.path, LAYOUT.block_bytes + 4097)
    report = verify_directory(tier.path)
    assert (report.verified, report.corrupt_slots) == (2, [1])
    assert load(tier, LAYOUT, make_key(1), 1).corrupt
    assert load(tier, LAYOUT, make_key(1), 1).outcome is Outcome.MISS
    assert load(tier, LAYOUT, make_key(0), 0).outcome is Outcome.HIT


def test_a_kind_of_checksum_of_later_versions_is_not_called_corruption(tmp_path: Path) -> None:
    fields = (*NAMESPACE.fields, (CHECKSUM_FIELD, "page-sums-9"))
    tier = open_disk_tier(tmp_path, LAYOUT, Namespace(model="m", fields=fields), capacity_blocks=SLOT_COUNT)
    store(tier, LAYOUT, make_key(1), 1)
    assert tier.path is not None
    report = verify_directory(tier.path)
    assert (report.readable, report.corrupt) == (False, 0)
    tier.close(keep=False)


def flip(path: Path, offset: int) -> None:
    with (path / "slab-000").open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_what_one_way_wrote_the_other_never_reads(tmp_path: Path, agent: ModelAgent) -> None:
    by_host = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=SLOT_COUNT)
    store(by_host, LAYOUT, make_key(1), 1)
    by_host.close(keep=True)
    direct = open_tier(tmp_path, agent)
    assert list(direct.recovered()) == []
    assert load(direct, LAYOUT, make_key(1), 1).outcome is Outcome.MISS
    store(direct, LAYOUT, make_key(2), 2)
    direct.close(keep=True)
    by_host = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=SLOT_COUNT)
    assert list(by_slot(by_host.recovered())) == [1]
    by_host.close(keep=False)


def test_transfers_of_a_shared_queue_go_one_by_one(tmp_path: Path, agent: ModelAgent) -> None:
    """A transfer behind one that never ends waits for its turn no longer than the limit."""
    tier = open_tier(tmp_path, agent, "POSIX")
    store(tier, LAYOUT, make_key(1), 1)
    agent.fate = "endless"
    buffers = [RunMemory(LAYOUT) for _ in range(4)]
    agent.may_begin.clear()
    for job, target in enumerate(buffers):
        assert tier.submit_load(job, [make_key(1)], SlotIndex(1), target.views) is Outcome.PENDING
    agent.may_begin.set()
    assert {c.outcome for c in collect(tier, 4, PATIENCE_S).values()} == {Outcome.RETRY}
    assert len(agent.transfers) == 1
    agent.finish()
    tier.close(keep=False)


def test_a_slot_that_the_device_may_still_write_to_is_given_to_nobody(
    tmp_path: Path, agent: ModelAgent
) -> None:
    """The load has failed, its lease has ended; the host slot comes back only with the tier."""
    clock, metrics = ManualClock(), Metrics()
    tier = open_tier(tmp_path, agent, clock=clock)
    options = SpaceOptions(staging=True)
    arena = HostArena(LAYOUT, 2, touch_threads=0)
    space = Space(LAYOUT, arena, tier, AdmitAll(), metrics, clock, lambda lease: None, options)
    space.reserve(0, 1, None, [make_key(1)])
    assert space.commit(0, 1) == 1
    while space.busy:
        space.pump()
    assert space.clear("host")[0] == 1
    agent.fate = "endless"
    lease = space.lookup(0, 2, [make_key(1)], 0)
    assert lease is not None
    wait_for(space, tier, lambda: bool(tier.fault) and not space.busy)
    assert lease.slots == []
    assert space.host_pool.counts().filling == 1
    agent.fate = "done"
    clock.advance(HEAL_S_MAX + 1)
    space.pump()
    assert (tier.fault != "", space.host_pool.counts().filling) == (True, 1)
    agent.finish()
    clock.advance(HEAL_S_MAX + 1)
    wait_for(space, tier, lambda: not tier.fault)
    assert (tier.fault, space.host_pool.counts().filling) == ("", 0)
    assert metrics.value("kvbm_failures_total", tier="disk", kind="io") == 1
    space.check()
    space.close(keep=False)


def wait_for(space: Space, tier: DiskTier, ready: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline_s
        select.select([tier.fileno()], [], [], 0.01)
        space.pump()


def test_a_failure_costs_no_block_of_its_neighbours(tmp_path: Path, agent: ModelAgent) -> None:
    """Loads that wait for their turn behind one that fails are not read, but nothing is wrong with their blocks."""
    tier = open_tier(tmp_path, agent, "POSIX")
    for slot in range(4):
        store(tier, LAYOUT, make_key(slot), slot)
    agent.fate = "error"
    buffers = [RunMemory(LAYOUT) for _ in range(4)]
    agent.may_begin.clear()
    for slot, target in enumerate(buffers):
        assert tier.submit_load(slot, [make_key(slot)], SlotIndex(slot), target.views) is Outcome.PENDING
    agent.may_begin.set()
    assert {c.outcome for c in collect(tier, 4, PATIENCE_S).values()} == {Outcome.RETRY}
    agent.fate = "done"
    assert heal(tier)
    assert len(by_slot(tier.recovered())) == 3
    tier.close(keep=False)


def test_runs_go_both_ways_and_a_failure_costs_one_block_of_a_run(tmp_path: Path, agent: ModelAgent) -> None:
    """Of several shards each block's buffers are transfers of their own, so that it is known which one failed."""
    tier = open_tier(tmp_path, agent, "POSIX")
    assert outcomes(store_run(tier, LAYOUT, range(4), 1)) == [Outcome.HIT] * 4
    assert outcomes(load_run(tier, LAYOUT, range(4), 1)) == [Outcome.HIT] * 4
    agent.fate = "error"
    failed = load_run(tier, LAYOUT, range(4), 1)
    assert (outcomes(failed), failed.still_in_use) == ([Outcome.RETRY] * 4, True)
    agent.fate = "done"
    assert heal(tier)
    assert sorted(by_slot(tier.recovered())) == [2, 3, 4]
    tier.close(keep=False)


def test_a_run_of_one_shard_is_one_transfer(
    tmp_path: Path, agent: ModelAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = BlockLayout(block_tokens=16, shard_bytes=4096)
    io = NixlBlockIo("POSIX", agent, HostMemory())
    tier = open_disk_tier(tmp_path, layout, NAMESPACE, capacity_blocks=8, io_threads=1, io=io)
    store_run(tier, layout, range(4), 1)
    operations: list[str] = []
    genuine = agent.prepare
    with monkeypatch.context() as patch:
        patch.setattr(agent, "prepare", lambda *what: (operations.append(what[0]), genuine(*what))[1])
        assert outcomes(load_run(tier, layout, range(4), 1)) == [Outcome.HIT] * 4
    assert operations == ["READ"]
    agent.fate = "error"
    load_run(tier, layout, range(4), 1)
    agent.fate = "done"
    assert heal(tier)
    assert list(tier.recovered()) == [], "any of them may be the one that cannot be read"
    tier.close(keep=False)
