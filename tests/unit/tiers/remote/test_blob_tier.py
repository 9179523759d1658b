"""The tier over blobs on bad days: silence, damage, full stores, and packs that are not what was believed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvbm.block import Outcome
from kvbm.errors import SettingsError
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.remote_contract import (
    RemoteBuffers,
    chain,
    collect,
    content,
    keys_of,
    load,
    load_each,
    store,
)
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE
from kvbm.tiers.remote.blob_tier import open_blob_tier
from kvbm.tiers.remote.blobs import Buffer, StoreError
from kvbm.tiers.remote.contract import NOWHERE
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.pack_size import LOAD_BYTES_MAX, PACK_BYTES_MAX
from kvbm.tiers.remote.packs import pack
from kvbm.tiers.remote.sealing import MasterKey, Sealer
from rigs import packed
from rigs.faulty_blobs import BlobFault, BlobRule, FaultyBlobs, MemoryBlobs
from rigs.remote_nodes import PREFIX, Nodes, until


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    for node in nodes.made:
        node.close()


def test_a_silent_store_costs_a_deadline_and_touches_nothing_afterwards(nodes: Nodes) -> None:
    faulty = FaultyBlobs(nodes.blobs)
    node = nodes.make(faulty)
    blocks = chain(0, 2)
    store(node, LAYOUT, blocks)
    faulty.arm(BlobRule(fault=BlobFault.SILENT, operation="read", name="packs/"))
    targets = RemoteBuffers(LAYOUT, 2)
    place = node.places(keys_of(blocks))[0]
    assert node.submit_load(5, keys_of(blocks), place, targets.views, None) is Outcome.PENDING
    assert faulty.wait_silent(1)
    assert node.poll() == []
    nodes.clock.advance(2.0)
    (completion,) = collect(node, 1).values()
    assert completion.outcome is Outcome.RETRY and "did not answer" in completion.error
    targets.fill(0x33)
    faulty.disarm()
    faulty.release()
    until(node, lambda: node.describe()["hanging"] == 0)
    assert b"".join(targets.views[0]) == b"\x33" * LAYOUT.block_bytes, (
        "bytes that come too late are thrown away"
    )
    assert node.poll() == []
    assert load_each(node, LAYOUT, keys_of(blocks)) == [Outcome.HIT] * 2


def test_sources_may_change_once_a_store_has_ended_although_the_store_still_reads(nodes: Nodes) -> None:
    faulty = FaultyBlobs(nodes.blobs)
    node = nodes.make(faulty, store_deadline_s=10.0)
    faulty.arm(BlobRule(fault=BlobFault.SILENT, operation="put", name="packs/"))
    blocks = chain(0, 2)
    sources = RemoteBuffers.of(keys_of(blocks), LAYOUT)
    assert node.submit_store(5, blocks, sources.views, None) is Outcome.PENDING
    assert faulty.wait_silent(1)
    nodes.clock.advance(10.0)
    assert collect(node, 1)[5].outcome is Outcome.RETRY
    sources.fill(0x33)
    faulty.disarm()
    faulty.release()
    until(node, lambda: bool(nodes.packs()))
    until(node, lambda: node.poll() == [] and node.places(keys_of(blocks))[0] != NOWHERE)
    assert load_each(node, LAYOUT, keys_of(blocks)) == [Outcome.HIT] * 2


def test_loads_that_hang_turn_the_tier_off_until_a_thread_is_free(nodes: Nodes) -> None:
    faulty = FaultyBlobs(nodes.blobs)
    node = nodes.make(faulty, load_threads=3, pending_limit=16)
    blocks = chain(0, 1)
    store(node, LAYOUT, blocks)
    place = node.places(keys_of(blocks))[0]
    faulty.arm(BlobRule(fault=BlobFault.SILENT, operation="read", name="packs/", times=3))
    targets = [RemoteBuffers(LAYOUT, 1) for _ in range(3)]
    for job in range(3):
        assert node.submit_load(job, keys_of(blocks), place, targets[job].views, None) is Outcome.PENDING
    assert node.load_room == 0, "a load's deadline does not pass while it waits for a thread"
    assert faulty.wait_silent(3)
    nodes.clock.advance(2.0)
    assert {completion.outcome for completion in collect(node, 3).values()} == {Outcome.RETRY}
    assert "slow" in node.fault and "memory:" in node.fault
    assert node.submit_load(9, keys_of(blocks), place, targets[0].views, None) is Outcome.RETRY
    assert node.submit_store(9, blocks, targets[0].views, None) is Outcome.RETRY
    nodes.clock.advance(60.0)
    node.tick()
    assert node.describe()["hanging"] == 3 and node.describe()["reading"] == "open", (
        "no probe while no thread could read"
    )
    faulty.release()
    until(node, lambda: node.describe()["hanging"] == 0)
    node.tick()
    until(node, lambda: node.fault == "")
    assert load(node, LAYOUT, keys_of(blocks), place).outcome is Outcome.HIT


def test_threads_that_hang_take_room_from_loads_and_stores(nodes: Nodes) -> None:
    faulty = FaultyBlobs(nodes.blobs)
    node = nodes.make(faulty, load_threads=3, store_threads=2, pending_limit=16, store_deadline_s=2.0)
    blocks = chain(0, 1)
    store(node, LAYOUT, blocks)
    place, targets = node.places(keys_of(blocks))[0], RemoteBuffers(LAYOUT, 1)
    for operation in ("read", "put"):
        faulty.arm(BlobRule(fault=BlobFault.SILENT, operation=operation, name="packs/", times=1))
    assert node.submit_load(1, keys_of(blocks), place, targets.views, None) is Outcome.PENDING
    sources = RemoteBuffers.of(keys_of(chain(10, 1)), LAYOUT)
    assert node.submit_store(2, chain(10, 1), sources.views, None) is Outcome.PENDING
    assert faulty.wait_silent(2)
    nodes.clock.advance(2.0)
    collect(node, 2)
    assert (node.load_room, node.store_room) == (2, 2)
    assert (node.describe()["read_errors"], node.describe()["write_errors"]) == (1, 1)
    for job in range(3, 5):
        assert node.submit_load(job, keys_of(blocks), place, targets.views, None) is Outcome.PENDING
        collect(node, 1)
    faulty.release()
    until(node, lambda: (node.load_room, node.store_room) == (3, 4))


class FailsAtLast(FaultyBlobs):
    """Reads of packs fail, the silent ones once they are released."""

    def read(self, name: str, start: int, end: int) -> Buffer | None:
        found = super().read(name, start, end)
        if "packs/" in name:
            raise StoreError("failed", "no answer")
        return found


def test_a_late_read_that_fails_at_last_is_one_error(nodes: Nodes) -> None:
    faulty = FailsAtLast(nodes.blobs)
    node, blocks = nodes.make(faulty), chain(0, 1)
    store(node, LAYOUT, blocks)
    place, targets = node.places(keys_of(blocks))[0], RemoteBuffers(LAYOUT, 1)
    faulty.arm(BlobRule(fault=BlobFault.SILENT, operation="read", name="packs/", times=1))
    assert node.submit_load(1, keys_of(blocks), place, targets.views, None) is Outcome.PENDING
    assert faulty.wait_silent(1)
    nodes.clock.advance(2.0)
    assert collect(node, 1)[1].outcome is Outcome.RETRY
    assert node.describe()["read_errors"] == 1
    faulty.release()
    until(node, lambda: node.describe()["hanging"] == 0)
    assert node.describe()["read_errors"] == 1
    assert load(node, LAYOUT, keys_of(blocks), place).outcome is Outcome.RETRY
    assert node.describe()["read_errors"] == 2


def test_a_listing_is_complete_once_what_it_found_was_taken_in(nodes: Nodes) -> None:
    first, blocks = nodes.make(), chain(0, 2)
    store(first, LAYOUT, blocks)
    options = RemoteOptions(collect=False)
    second = open_blob_tier(nodes.blobs, LAYOUT, NAMESPACE, options, nodes.clock, random.Random(9))
    nodes.made.append(second)
    assert second.settle(20.0)
    assert not second.describe()["complete"] and second.places(keys_of(blocks))[0] == NOWHERE
    second.poll()
    assert second.describe()["complete"] and second.places(keys_of(blocks))[0] != NOWHERE


@pytest.mark.parametrize("fault", [BlobFault.FULL, BlobFault.REFUSED])
def test_a_store_that_takes_nothing_still_gives(nodes: Nodes, fault: BlobFault) -> None:
    faulty = FaultyBlobs(nodes.blobs)
    node = nodes.make(faulty)
    store(node, LAYOUT, chain(0, 2))
    faulty.arm(BlobRule(fault=fault, operation="put"))
    assert store(node, LAYOUT, chain(10, 2)).outcome is Outcome.RETRY
    sources = RemoteBuffers(LAYOUT, 1)
    assert node.submit_store(3, chain(20, 1), sources.views, None) is Outcome.RETRY
    assert node.fault == "" and fault.value in node.store_fault
    assert node.describe()["store_fault"] == node.store_fault
    assert load_each(node, LAYOUT, keys_of(chain(0, 2))) == [Outcome.HIT] * 2
    nodes.pass_on(node, seconds=1.0)
    assert node.describe()["writing"] == "open", "the probe was refused too"
    faulty.disarm()
    nodes.pass_on(node, seconds=2.0)
    assert store(node, LAYOUT, chain(10, 2)).outcome is Outcome.HIT


def test_refused_reads_turn_it_off_and_it_comes_back(nodes: Nodes) -> None:
    faulty = FaultyBlobs(nodes.blobs)
    node = nodes.make(faulty)
    blocks = chain(0, 1)
    store(node, LAYOUT, blocks)
    faulty.arm(BlobRule(fault=BlobFault.REFUSED, operation="read"))
    assert load(node, LAYOUT, keys_of(blocks), node.places(keys_of(blocks))[0]).outcome is Outcome.RETRY
    assert "refused" in node.fault
    for seconds in (1.0, 2.0, 4.0):
        nodes.pass_on(node, seconds=seconds)
        assert node.fault
    faulty.disarm()
    nodes.pass_on(node, seconds=8.0)
    assert node.fault == ""


def test_a_pack_that_is_gone_is_forgotten_whole(nodes: Nodes) -> None:
    node = nodes.make()
    blocks = chain(0, 3)
    store(node, LAYOUT, blocks)
    assert len(node.news().came) == 3
    nodes.blobs.delete(nodes.packs())
    assert load(node, LAYOUT, [blocks[1].key], node.places([blocks[1].key])[0]).outcome is Outcome.MISS
    assert node.places(keys_of(blocks)) == [NOWHERE] * 3
    assert sorted(node.news().gone) == sorted(keys_of(blocks))


def damage(nodes: Nodes, block: int) -> None:
    (name,) = nodes.packs()
    spoilt = bytearray(nodes.blobs.blobs[name])
    found = spoilt.find(content(chain(block, 1)[0].key, LAYOUT)[:64])
    assert found > 0
    spoilt[found] ^= 1
    nodes.blobs.blobs[name] = bytes(spoilt)


def test_a_damaged_block_is_a_miss_and_its_pack_is_removed_so_that_it_can_be_stored_again(
    nodes: Nodes,
) -> None:
    node = nodes.make()
    blocks = chain(0, 3)
    store(node, LAYOUT, blocks)
    damage(nodes, 1)
    loaded = load(node, LAYOUT, keys_of(blocks), node.places(keys_of(blocks))[0])
    ends = [(end.outcome, end.corrupt) for end in loaded.blocks]
    assert ends == [(Outcome.HIT, False), (Outcome.MISS, True), (Outcome.HIT, False)]
    assert [place == NOWHERE for place in node.places(keys_of(blocks))] == [False, True, False]
    nodes.pass_on(node)
    assert nodes.packs() == [] and node.describe()["deleted_packs"] == 1
    assert node.places(keys_of(blocks)) == [NOWHERE] * 3
    assert store(node, LAYOUT, blocks).outcome is Outcome.HIT
    assert load_each(node, LAYOUT, keys_of(blocks)) == [Outcome.HIT] * 3


def test_a_block_that_was_damaged_on_its_way_costs_no_pack(nodes: Nodes) -> None:
    faulty = FaultyBlobs(nodes.blobs)
    node = nodes.make(faulty)
    blocks = chain(0, 1)
    store(node, LAYOUT, blocks)
    faulty.arm(BlobRule(fault=BlobFault.TRUNCATED, operation="read", name="packs/", times=1))
    loaded = load(node, LAYOUT, keys_of(blocks), node.places(keys_of(blocks))[0])
    assert loaded.corrupt
    nodes.pass_on(node)
    assert len(nodes.packs()) == 1


def test_a_pack_that_is_there_is_believed_by_its_own_index_alone(nodes: Nodes) -> None:
    blocks = chain(0, 3)
    zeros = [[memoryview(bytes(LAYOUT.slot_bytes))] * LAYOUT.shard_count] * 3
    other = [block._replace(facts=b"other facts") for block in blocks]
    theirs = pack(LAYOUT, NAMESPACE.fingerprint, other, zeros)
    node = nodes.make()
    nodes.blobs.put(PREFIX + theirs.entry.name, theirs.parts)
    sources = RemoteBuffers(LAYOUT, 3)
    assert node.submit_store(1, blocks, sources.views, None) is Outcome.PENDING
    assert collect(node, 1)[1].outcome is Outcome.HIT
    targets = RemoteBuffers(LAYOUT, 3)
    targets.fill(1)
    assert node.submit_load(2, keys_of(blocks), node.places(keys_of(blocks))[0], targets.views, None)
    assert collect(node, 1)[2].outcome is Outcome.HIT
    assert b"".join(targets.views[2]) == bytes(LAYOUT.block_bytes)


def test_a_pack_that_was_written_again_otherwise_is_learned_anew_and_not_removed(nodes: Nodes) -> None:
    blocks = chain(0, 3)
    here = nodes.make()
    sources = RemoteBuffers(LAYOUT, 3)
    assert here.submit_store(1, blocks, sources.views, None) is Outcome.PENDING
    collect(here, 1)
    (name,) = nodes.packs()
    nodes.blobs.delete([name])
    other = [block._replace(facts=b"other facts") for block in blocks]
    nodes.blobs.put(name, pack(LAYOUT, NAMESPACE.fingerprint, other, sources.views).parts)
    place = here.places(keys_of(blocks))[0]
    assert here.submit_load(2, keys_of(blocks), place, sources.views, None) is Outcome.PENDING
    assert collect(here, 1)[2].outcome is Outcome.MISS
    nodes.pass_on(here)
    assert nodes.packs() == [name]
    place = here.places(keys_of(blocks))[0]
    assert here.submit_load(3, keys_of(blocks), place, sources.views, None) is Outcome.PENDING
    assert collect(here, 1)[3].outcome is Outcome.HIT


def test_a_compressed_pack_is_left_alone_and_counted(nodes: Nodes) -> None:
    """A version that compressed has written it: nobody reads it, touches it, tells of it or removes it."""
    blocks = chain(0, 3)
    sources = [[memoryview(bytes(LAYOUT.slot_bytes))] * LAYOUT.shard_count] * 3
    theirs = packed.compressed_blob(packed.Blocks(LAYOUT, blocks, sources), NAMESPACE.fingerprint)
    name = PREFIX + theirs.entry.name
    nodes.blobs.put(name, [theirs.data])
    written_s = nodes.blobs.modified_s[name]
    node, other = nodes.make(), nodes.make()
    assert node.places(keys_of(blocks)) == [NOWHERE] * 3 and node.describe()["compressed_packs"] == 1
    nodes.clock.advance(1e6)
    assert store(node, LAYOUT, blocks).outcome is Outcome.HIT
    nodes.pass_on(node, other)
    nodes.pass_on(node, other)
    assert node.places(keys_of(blocks)) == [NOWHERE] * 3 and node.describe()["compressed_packs"] == 1
    assert other.describe()["compressed_packs"] == 1, "it was told of nothing"
    assert (nodes.blobs.blobs[name], nodes.blobs.modified_s[name]) == (theirs.data, written_s)


def test_blocks_of_a_compressed_pack_are_sent_once_an_hour(nodes: Nodes) -> None:
    """Each use offers them again, as no pack that can be read has them."""
    blocks = chain(0, 3)
    sources = [[memoryview(bytes(LAYOUT.slot_bytes))] * LAYOUT.shard_count] * 3
    theirs = packed.compressed_blob(packed.Blocks(LAYOUT, blocks, sources), NAMESPACE.fingerprint)
    nodes.blobs.put(PREFIX + theirs.entry.name, [theirs.data])
    node = nodes.make()
    requests = []
    for seconds in (0.0, 3599.0, 1.0):
        nodes.clock.advance(seconds)
        before = nodes.blobs.requests()
        assert store(node, LAYOUT, blocks).outcome is Outcome.HIT
        requests.append(nodes.blobs.requests()["put"] - before["put"])
    assert requests == [1, 0, 1]


def test_what_one_tenant_sealed_is_a_miss_for_another_and_stays(nodes: Nodes) -> None:
    pytest.importorskip("cryptography")
    node, blocks = nodes.make(seal=Sealer([MasterKey("a", bytes(32))])), chain(0, 2)
    store(node, LAYOUT, blocks, tenant="ours")
    place = node.places(keys_of(blocks))[0]
    assert load(node, LAYOUT, keys_of(blocks), place, tenant="ours").outcome is Outcome.HIT
    theirs = load(node, LAYOUT, keys_of(blocks), place, tenant="theirs")
    assert (theirs.outcome, theirs.corrupt) == (Outcome.MISS, False)
    nodes.pass_on(node)
    assert len(nodes.packs()) == 1
    store(node, LAYOUT, blocks, tenant="theirs")
    assert len(nodes.packs()) == 2
    place = node.places(keys_of(blocks))[0]
    assert load(node, LAYOUT, keys_of(blocks), place, tenant="theirs").outcome is Outcome.HIT


def test_garbage_under_a_packs_name_is_replaced(nodes: Nodes) -> None:
    node, blocks = nodes.make(), chain(0, 2)
    store(node, LAYOUT, blocks)
    (name,) = nodes.packs()
    nodes.blobs.blobs[name] = b"garbage" * 100
    assert store(nodes.make(), LAYOUT, blocks).outcome is Outcome.HIT
    assert load_each(node, LAYOUT, keys_of(blocks)) == [Outcome.HIT] * 2


def test_closing_beside_a_silent_store_is_bounded(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.tiers.remote.blob_tier.CLOSE_LIMIT_S", 0.1)
    faulty = FaultyBlobs(nodes.blobs)
    node = nodes.make(faulty)
    blocks = chain(0, 1)
    store(node, LAYOUT, blocks)
    faulty.arm(BlobRule(fault=BlobFault.SILENT))
    targets = RemoteBuffers(LAYOUT, 1)
    place = node.places(keys_of(blocks))[0]
    assert node.submit_load(7, keys_of(blocks), place, targets.views, None) is Outcome.PENDING
    assert faulty.wait_silent(1)
    node.close()
    assert [(done.job_id, done.outcome) for done in node.poll()] == [(7, Outcome.RETRY)]
    faulty.release()


def test_ephemeral_namespaces_are_refused(nodes: Nodes) -> None:
    with pytest.raises(AssertionError, match="ephemeral"):
        open_blob_tier(nodes.blobs, LAYOUT, Namespace(model="m", fields=(), ephemeral=True))


@pytest.mark.parametrize("block_bytes", [4 << 10, 128 << 10, 2 << 20, 5 << 20, 40 << 20])
@pytest.mark.parametrize("blob_bytes_max", [48 << 20, 5 << 30])
def test_sizes_of_packs_and_loads(nodes: Nodes, block_bytes: int, blob_bytes_max: int) -> None:
    layout = BlockLayout(block_tokens=16, shard_bytes=block_bytes)
    blobs = MemoryBlobs(nodes.clock, blob_bytes_max=blob_bytes_max)
    node = open_blob_tier(
        blobs, layout, NAMESPACE, RemoteOptions(collect=False), nodes.clock, random.Random(1)
    )
    nodes.made.append(node)
    assert node.load_blocks_max == max(1, LOAD_BYTES_MAX // block_bytes)
    size = node.store_blocks_max * block_bytes
    assert size <= min(blob_bytes_max, PACK_BYTES_MAX)
    assert size >= 8 << 20 or node.store_blocks_max == 1024
    if 17 * block_bytes <= min(blob_bytes_max, PACK_BYTES_MAX):
        assert node.store_blocks_max >= 16


def test_a_block_that_no_blob_can_hold_is_refused(nodes: Nodes) -> None:
    with pytest.raises(SettingsError, match="at most 4096 bytes"):
        open_blob_tier(MemoryBlobs(nodes.clock, blob_bytes_max=4096), LAYOUT, NAMESPACE)
