"""The simulated store, case by case: a clock that the test moves, blocks of 1,000 bytes, packs of 3, reads of 2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbm.errors import SettingsError
from kvbm.policy import LeafFirstLru
from kvbm.sim.serving.store import POLL_S, SimulatedStore, StoreRules
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.upkeep import LOG_PERIOD_S

RULES = StoreRules(
    block_bytes=1000,
    pack_blocks=3,
    load_blocks=2,
    ttl_s=100.0,
    linger_s=10.0,
    known_after_s=4.0,
    admission="all",
)
CHAIN = [0, 1, 2, 3, 4, 5, 6, 7]


class Nodes:
    """Nodes of 8 blocks of host memory over one store."""

    def __init__(self, rules: StoreRules = RULES, nodes: int = 2) -> None:
        self.hosts = [SimulatedTier(8, LeafFirstLru(8)) for _ in range(nodes)]
        self.store = SimulatedStore(rules, self.hosts)
        self.use = self.store.use

    def compute(self, node: int, blocks: list[int], now_s: float, parent: int | None = None) -> None:
        self.store.advance(now_s)
        self.hosts[node].insert(
            blocks if parent is None else [parent, *blocks], int(parent is not None), now_s
        )
        self.store.offered(node, blocks, parent, now_s)

    def known(self, node: int, now_s: float, blocks: list[int] = CHAIN) -> list[int]:
        self.store.advance(now_s)
        return [block for block in blocks if self.store.holds(node, block, now_s)]


def test_a_full_pack_is_written_at_once_and_the_rest_when_it_has_waited() -> None:
    nodes = Nodes()
    nodes.compute(0, CHAIN[:5], 1.0)
    assert nodes.known(0, 1.0) == [0, 1, 2]
    assert nodes.known(0, 10.9) == [0, 1, 2]
    assert nodes.known(0, 11.0) == [0, 1, 2, 3, 4]
    assert nodes.use.pack_puts == 2 and nodes.use.written_blocks == 5


def test_a_pack_gathers_along_its_chain_only() -> None:
    nodes = Nodes()
    nodes.compute(0, [0], 1.0)
    nodes.compute(0, [1], 2.0, parent=0)
    nodes.compute(0, [5], 3.0)  # of another chain
    nodes.compute(0, [2], 4.0, parent=1)  # the third
    assert nodes.known(0, 4.0) == [0, 1, 2]
    assert nodes.known(0, 13.0) == [0, 1, 2, 5]
    assert nodes.use.pack_puts == 2


def test_others_learn_of_it_later() -> None:
    nodes = Nodes()
    nodes.compute(0, CHAIN[:3], 1.0)
    assert nodes.known(1, 4.9) == []
    assert nodes.known(1, 5.0) == [0, 1, 2]
    assert nodes.use.log_puts == 1 and nodes.use.log_gets == 1


def test_a_node_that_does_not_know_yet_writes_again() -> None:
    nodes = Nodes()
    nodes.compute(0, CHAIN[:3], 1.0)
    nodes.compute(1, CHAIN[:3], 2.0)  # the very same pack: the store refuses it
    assert nodes.use.pack_puts == 2 and nodes.use.existed == 1
    assert nodes.use.written_blocks == 3 and nodes.use.again == 0
    assert nodes.known(1, 2.0) == [0, 1, 2]
    nodes = Nodes()
    nodes.compute(0, CHAIN[:3], 1.0)
    nodes.compute(1, CHAIN[1:4], 2.0)  # others, of which it has two
    assert nodes.use.written_blocks == 6 and nodes.use.again == 2
    assert nodes.store.block_count == 6


def test_what_is_known_to_be_there_is_not_written_again() -> None:
    nodes = Nodes()
    nodes.compute(0, CHAIN[:3], 1.0)
    nodes.compute(1, CHAIN[:3], 5.0)
    nodes.store.offered(0, CHAIN[:3], None, 6.0)
    assert nodes.use.pack_puts == 1


def test_what_host_memory_loses_meanwhile_is_not_written_nor_what_is_behind_it() -> None:
    nodes = Nodes(replace(RULES, pack_blocks=8))
    nodes.compute(0, [0, 1, 2, 3], 1.0)
    # Another chain takes the room of the end of the first.
    nodes.hosts[0].insert([10, 11, 12, 13, 14, 15], 0, 2.0)
    left = nodes.hosts[0].leading([0, 1, 2, 3])
    assert 0 < left < 4
    assert nodes.known(0, 11.0) == CHAIN[:left]
    assert nodes.use.lost_blocks == 4 - left


def test_reads_are_counted_by_pack_and_by_what_one_read_takes() -> None:
    nodes = Nodes()
    nodes.compute(0, CHAIN[:5], 1.0)
    nodes.store.advance(11.0)
    nodes.store.read(0, CHAIN[:5], 20.0)
    # 0 1 | 2 of the first pack, 3 4 of the second.
    assert nodes.use.pack_gets == 3 and nodes.use.read_blocks == 5
    assert nodes.use.pauses_s == [19.0, 19.0, 19.0, 9.0, 9.0]
    nodes.store.read(0, [0, 2], 21.0)  # not neighbours
    assert nodes.use.pack_gets == 5
    assert nodes.use.pauses_s[-2:] == [1.0, 1.0]


def test_packs_go_when_nobody_has_used_them_for_the_ttl() -> None:
    nodes = Nodes()
    nodes.compute(0, CHAIN[:3], 1.0)
    nodes.compute(0, CHAIN[3:6], 2.0, parent=2)
    nodes.store.read(0, [3], 90.0)
    assert nodes.known(0, 101.0) == CHAIN[:6]
    assert nodes.known(0, 101.5) == [3, 4, 5]
    assert nodes.known(0, 190.5) == []
    # 3 blocks from 1 to 101 and 3 from 2 to 190.
    assert nodes.use.byte_s == pytest.approx(3000 * 100.0 + 3000 * 188.0)
    assert nodes.use.touches == 1  # more than a quarter of the TTL after it was written
    assert nodes.use.removed_blocks == 6


def test_what_is_hit_in_host_memory_is_touched_now_and_then() -> None:
    nodes = Nodes()
    nodes.compute(0, CHAIN[:3], 0.0)
    nodes.compute(1, [5, 6, 7], 0.0)
    for now_s in range(5, 300, 5):
        nodes.store.advance(float(now_s))
        nodes.store.offered(0, CHAIN[:3], None, float(now_s))
    assert nodes.known(0, 299.0) == CHAIN[:3]
    assert nodes.use.touches == 11, "once in a quarter of the TTL"
    assert nodes.known(0, 399.0) == []


def test_what_waits_in_full_host_memory_is_written_before_it_goes() -> None:
    nodes = Nodes(nodes=1)
    for number in range(20):
        nodes.compute(0, [100 + number], number / 10)
    nodes.store.finish(2.0)
    assert (nodes.use.written_blocks, nodes.use.lost_blocks) == (20, 0)
    assert nodes.use.pack_puts == 20


def test_the_least_recently_used_packs_make_room() -> None:
    nodes = Nodes(replace(RULES, size_bytes=7000))
    nodes.compute(0, [0, 1, 2], 1.0)
    nodes.compute(0, [3, 4, 5], 2.0, parent=2)
    nodes.store.read(0, [0], 3.0)
    nodes.compute(0, [20, 21, 22], 4.0)
    assert nodes.known(0, 4.0, [*CHAIN, 20, 21, 22]) == [0, 1, 2, 20, 21, 22]
    assert nodes.store.block_count == 6


def test_the_end_of_a_run_writes_what_waits_and_charges_what_stays() -> None:
    nodes = Nodes()
    nodes.compute(0, CHAIN[:2], 1.0)
    nodes.store.finish(5.0)
    assert nodes.use.written_blocks == 2
    assert nodes.use.byte_s == pytest.approx(2000 * 100.0)


def test_admission_is_each_nodes_own() -> None:
    nodes = Nodes(replace(RULES, admission="ghost"))
    nodes.compute(0, CHAIN[:3], 1.0)
    nodes.compute(1, CHAIN[:3], 2.0)
    assert nodes.use.pack_puts == 0 and nodes.use.refused_blocks == 6
    nodes.store.offered(0, CHAIN[:3], None, 3.0)  # offered for the second time
    assert nodes.known(0, 3.0) == [0, 1, 2]


def test_logs_are_written_once_a_second() -> None:
    nodes = Nodes(nodes=3)
    for number, now_s in enumerate((1.0, 1.2, 1.4, 1.9, 9.0)):
        nodes.compute(0, [10 * number, 10 * number + 1, 10 * number + 2], now_s)
    # At 1, at 2 with those from 1.2 to 1.9, and at 9; two others read each.
    assert nodes.use.log_puts == 3 and nodes.use.log_gets == 6


def test_times_are_those_of_the_manager() -> None:
    assert POLL_S == RemoteOptions().poll_s
    rules = StoreRules.of(1000)
    assert rules.ttl_s == RemoteOptions().ttl_s
    assert rules.known_after_s == (LOG_PERIOD_S + POLL_S) / 2


def test_blocks_larger_than_a_pack_take_several_requests() -> None:
    rules = StoreRules.of(64 << 20)
    assert (rules.pack_blocks, rules.puts_each, rules.load_blocks, rules.gets_each) == (1, 2, 1, 2)
    nodes = Nodes(rules)
    nodes.compute(0, [0, 1], 1.0)
    nodes.store.read(0, [0, 1], 2.0)
    assert nodes.use.pack_puts == 4 and nodes.use.pack_gets == 4
    usual = StoreRules.of(2 << 20)
    assert (usual.pack_blocks, usual.puts_each, usual.load_blocks, usual.gets_each) == (16, 1, 16, 1)


def test_an_unknown_admission() -> None:
    with pytest.raises(SettingsError, match="--remote-admission='most'"):
        StoreRules.of(1000, admission="most").check()
