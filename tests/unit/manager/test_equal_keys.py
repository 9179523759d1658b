"""Two models that are asked the same have equal keys: a key says nothing outside its namespace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.block import BlockKey, Outcome, SlotIndex, Tier
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Asked,
    Commit,
    Follow,
    Hello,
    Progress,
    Reset,
    ResetReply,
    Welcome,
)
from kvbm.testing.oracle import block_bytes
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, OTHER_NAMESPACE, RunMemory, collect, load, make_key
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.tier import open_disk_tier
from rigs.manager import KEYS, OTHER, Client, ManagerBench

MakeBench = Callable[..., ManagerBench]
SIZE = 4096


def store(leader: Client, worker: Client, number: int, keys: list[BlockKey], nonce: int) -> None:
    for slot, key in zip(leader.reserve(number, keys), keys, strict=True):
        assert slot >= 0
        worker.write(slot, key, nonce)
    leader.send(Commit(store=number))


def expect(leader: Client, worker: Client, number: int, keys: list[BlockKey], nonce: int, tier: Tier) -> None:
    """The keys lead to this engine's own bytes, from this tier."""
    found = leader.lookup(number, keys)
    assert found.sources == bytes([tier]) * len(keys)
    ready = found.ready
    while ready < len(keys):
        progress = leader.expect(Progress)
        ready = progress.ready
        assert not progress.final or ready == len(keys)
    for slot, key in zip(found.slots, keys, strict=True):
        assert worker.read(slot) == block_bytes(key, nonce, SIZE)


def test_one_manager_never_serves_one_namespace_with_the_others_blocks(
    make_manager: MakeBench, tmp_path: Path
) -> None:
    """In host memory, on disk, and after both have gone through it; what one drops stays with the other."""
    manager = make_manager(
        namespaces=2, host_blocks=32, disk_blocks=32, disk_dir=str(tmp_path), disk_offload_filter=False
    )
    leader_a, worker_a = manager.engine("a")
    leader_b, worker_b = manager.engine("b", namespace=OTHER)
    keys = KEYS[:4]
    store(leader_a, worker_a, 1, keys, nonce=1)
    assert leader_b.lookup(2, keys).slots == ()
    manager.until(lambda: not manager.space(0).busy)
    for tier in ("host", ""):
        assert leader_b.lookup(3, keys).slots == ()
        if tier:
            manager.space(0).clear(tier)
    assert leader_b.lookup(4, keys).slots == (), "the other's lie on disk now"
    store(leader_b, worker_b, 5, keys, nonce=2)
    manager.until(lambda: not manager.space(1).busy)
    expect(leader_a, worker_a, 6, keys, nonce=1, tier=Tier.DISK)
    expect(leader_b, worker_b, 6, keys, nonce=2, tier=Tier.HOST)
    manager.space(1).clear("host")  # what is leased stays
    leader_b.send(Reset())
    assert leader_b.expect(ResetReply).in_use > 0
    expect(leader_a, worker_a, 7, keys, nonce=1, tier=Tier.HOST)
    expect(leader_b, worker_b, 7, keys, nonce=2, tier=Tier.HOST)


def test_who_follows_hears_of_which_namespace_a_key_is(make_manager: MakeBench) -> None:
    manager = make_manager(namespaces=2)
    leader_a, _ = manager.engine("a")
    leader_b, _ = manager.engine("b", namespace=OTHER)
    admin = manager.client()
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    admin.send(Follow())
    leader_a.lookup(1, KEYS[:2])
    leader_b.lookup(1, KEYS[:2])
    first, second = admin.expect(Asked), admin.expect(Asked)
    assert first.keys == second.keys
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("moved", ["nothing", "slab-000", "journal", "both"])
def test_bytes_of_another_namespace_under_the_same_key_are_never_believed(tmp_path: Path, moved: str) -> None:
    """Files of one namespace's directory put into the other's: equal keys in equal slots."""
    roots = [tmp_path / "a", tmp_path / "b"]
    paths = []
    for number, (root, namespace) in enumerate(zip(roots, (NAMESPACE, OTHER_NAMESPACE), strict=True), 1):
        tier = open_disk_tier(root, LAYOUT, namespace, capacity_blocks=4)
        views = RunMemory.of([make_key(number)], LAYOUT).views
        assert tier.submit_store(0, [BlockHead(make_key(1), None)], SlotIndex(1), views) is Outcome.PENDING
        assert collect(tier, 1)[0].outcome is Outcome.HIT
        assert tier.path is not None
        paths.append(tier.path)
        tier.close(keep=True)
    for name in {"nothing": (), "both": ("slab-000", "journal")}.get(moved, (moved,)):
        (paths[0] / name).write_bytes((paths[1] / name).read_bytes())
    tier = open_disk_tier(roots[0], LAYOUT, NAMESPACE, capacity_blocks=4)
    expected = Outcome.HIT if moved == "nothing" else Outcome.MISS
    assert load(tier, LAYOUT, make_key(1), 1).outcome is expected
    tier.close(keep=False)
