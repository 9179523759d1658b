"""Two nodes over one store against a dict: whatever happens to the store, a hit has the bytes that were stored.

A block's bytes follow from its key, so bytes of any other block, node or time are noticed. Every submission ends once,
and once it has ended its buffers are overwritten and watched.
"""

from __future__ import annotations

import random
import threading
import time

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvbm.block import BlockKey, Outcome
from kvbm.clock import ManualClock
from kvbm.layout import BlockLayout
from kvbm.testing.remote_contract import RemoteBuffers, chain, keys_of
from kvbm.testing.stored_runs import NAMESPACE, make_key
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion
from kvbm.tiers.remote.blob_tier import BlobTier, open_blob_tier
from kvbm.tiers.remote.contract import NOWHERE
from kvbm.tiers.remote.options import RemoteOptions
from rigs.faulty_blobs import BlobFault, BlobRule, FaultyBlobs, MemoryBlobs
from rigs.property_tests import scale_examples

LAYOUT = BlockLayout(block_tokens=16, shard_bytes=4096, shard_count=2)
BLOCKS = 24
NODES = 2
WATCHED = 6
WAIT_S = 20.0
OPTIONS = RemoteOptions(
    load_threads=2,
    store_threads=1,
    pending_limit=4,
    catalogue_blocks=40,
    ttl_s=2000.0,
    capacity_bytes=40 * LAYOUT.block_bytes,
    collect=False,
)
nodes_of = st.integers(0, NODES - 1)


class KeptOpen(MemoryBlobs):
    def close(self) -> None:
        pass


class RemoteMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.clock = ManualClock(1e5)
        self.blobs = KeptOpen(self.clock)
        self.random = random.Random(seed)
        self.faulty = [FaultyBlobs(self.blobs, seed=seed + number) for number in range(NODES)]
        self.nodes = [self.opened(number) for number in range(NODES)]
        self.stored: dict[BlockKey, BlockHead] = {}
        self.job = 0
        self.watched: list[tuple[RemoteBuffers, int]] = []

    def opened(self, number: int) -> BlobTier:
        return open_blob_tier(
            self.faulty[number], LAYOUT, NAMESPACE, OPTIONS, self.clock, random.Random(self.random.random())
        )

    # ---- loads and stores

    @rule(number=nodes_of, first=st.integers(0, BLOCKS - 1), count=st.integers(1, 6), tail=st.booleans())
    def store(self, number: int, first: int, count: int, tail: bool) -> None:
        blocks = chain(first, min(count, BLOCKS - first))
        sources = RemoteBuffers.of(keys_of(blocks), LAYOUT)
        self.job += 1
        outcome = self.nodes[number].submit_store(self.job, blocks, sources.views, None, tail)
        if outcome is not Outcome.PENDING:
            assert outcome is Outcome.RETRY and self.nodes[number].describe()["store_fault"]
            return
        # Before it is over: one that ends with RETRY may be in the store all the same.
        self.stored.update((block.key, block) for block in blocks)
        ended = self.ended(number, 1)[self.job]
        assert len(ended.blocks) == len(blocks)
        assert {end.outcome for end in ended.blocks} in ({Outcome.HIT}, {Outcome.RETRY})
        self.watch(sources)

    @rule(number=nodes_of, first=st.integers(0, BLOCKS - 1), count=st.integers(1, 6))
    def load(self, number: int, first: int, count: int) -> None:
        keys = keys_of(chain(first, min(count, BLOCKS - first)))
        places = self.nodes[number].places(keys)
        known = [key for key, place in zip(keys, places, strict=True) if place != NOWHERE]
        assert set(known) <= set(self.stored)
        for start, place in enumerate(places):
            if place == NOWHERE or (start and places[start - 1] == place - 1):
                continue
            end = start + 1
            while end < len(keys) and places[end] == places[end - 1] + 1:
                end += 1
            self.load_from(number, keys[start:end], place)

    @rule(number=nodes_of, here=st.integers(0, BLOCKS - 1), there=st.integers(0, BLOCKS - 1))
    def load_another(self, number: int, here: int, there: int) -> None:
        """A place that belongs to another block: no hit."""
        place = self.nodes[number].places([make_key(here)])[0]
        if place != NOWHERE and here != there:
            ends = self.load_from(number, [make_key(there)], place)
            assert Outcome.HIT not in [end.outcome for end in ends]

    def load_from(self, number: int, keys: list[BlockKey], place: int) -> list[BlockEnd]:
        node, targets = self.nodes[number], RemoteBuffers(LAYOUT, len(keys))
        self.job += 1
        outcome = node.submit_load(self.job, keys, place, targets.views, None)
        if outcome is not Outcome.PENDING:
            assert outcome in (Outcome.MISS, Outcome.RETRY)
            return []
        ended = self.ended(number, 1)[self.job]
        assert len(ended.blocks) == len(keys)
        for position, (key, end) in enumerate(zip(keys, ended.blocks, strict=True)):
            if end.outcome is Outcome.HIT:
                head = self.stored[key]
                assert targets.holds(position, key), "wrong bytes"
                assert (end.engine_hash, end.group, end.facts) == (head.engine_hash, head.group, head.facts)
        self.watch(targets)
        return list(ended.blocks)

    def ended(self, number: int, count: int) -> dict[int, Completion]:
        """The ends of so many submissions; where the store is silent, time goes by."""
        found: dict[int, Completion] = {}
        end_s = time.monotonic() + WAIT_S
        while len(found) < count:
            assert time.monotonic() < end_s, "a submission never ended"
            for completion in self.nodes[number].poll():
                assert completion.job_id not in found
                found[completion.job_id] = completion
            hangs = len(found) < count and not self.nodes[number]._exchange.wait_idle(0.01)
            if hangs and self.faulty[number].wait_silent(1, 0.0):
                self.clock.advance(30.0)
        return found

    def watch(self, buffers: RemoteBuffers) -> None:
        mark = self.random.randrange(256)
        buffers.fill(mark)
        self.watched = [*self.watched, (buffers, mark)][-WATCHED:]

    # ---- what happens to the store

    @rule(
        seed=st.integers(0, 1 << 20),
        how=st.sampled_from(["flip", "cut", "delete", "swap", "empty"]),
    )
    def damage(self, seed: int, how: str) -> None:
        # Which blobs there are depends on threads: nothing that hypothesis draws may.
        chosen, names = random.Random(seed), sorted(self.blobs.blobs)
        if not names:
            return
        name, other = chosen.choice(names), chosen.choice(names)
        data = self.blobs.blobs[name]
        if how == "flip" and data:
            at = chosen.randrange(len(data))
            self.blobs.blobs[name] = (
                data[:at] + bytes((data[at] ^ 1 << chosen.randrange(8),)) + data[at + 1 :]
            )
        elif how == "cut":
            self.blobs.blobs[name] = data[: chosen.randrange(len(data) + 1)]
        elif how == "swap":
            self.blobs.blobs[name], self.blobs.blobs[other] = self.blobs.blobs[other], data
        elif how == "empty":
            self.blobs.blobs[name] = b""
        else:
            self.blobs.delete([name])

    @rule(
        number=nodes_of,
        fault=st.sampled_from(sorted(BlobFault, key=lambda fault: fault.value)),
        operation=st.sampled_from(["", "put", "read", "read_end", "listing", "delete", "touch", "now_s"]),
        times=st.integers(1, 4),
        skip=st.integers(0, 2),
    )
    def fault(self, number: int, fault: BlobFault, operation: str, times: int, skip: int) -> None:
        name = ""
        if fault is BlobFault.SILENT:
            operation, name = ("read" if operation != "put" else "put"), "packs/"
        self.faulty[number].arm(
            BlobRule(fault=fault, operation=operation, name=name, times=times, skip=skip, seconds=0.0)
        )

    @rule(number=nodes_of)
    def repair(self, number: int) -> None:
        self.faulty[number].disarm()
        self.faulty[number].release()

    # ---- time

    @rule(number=nodes_of, seconds=st.sampled_from([0.5, 1.0, 5.0, 60.0, 700.0]))
    def passes(self, number: int, seconds: float) -> None:
        self.clock.advance(seconds)
        self.do_what_is_due(number)

    def do_what_is_due(self, number: int) -> None:
        node = self.nodes[number]
        node.tick()
        end_s = time.monotonic() + WAIT_S
        while not node.settle(0.05):
            self.faulty[number].release()
            assert time.monotonic() < end_s
        assert node.poll() == [], "nothing was submitted"

    @rule()
    def both_collect(self) -> None:
        errors: list[Exception] = []

        def collect(node: BlobTier) -> None:
            try:
                node.collector.run(in_turn=False)
            except Exception as error:
                if type(error).__name__ != "StoreError":
                    errors.append(error)

        threads = [threading.Thread(target=collect, args=(node,)) for node in self.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert errors == []

    @rule(number=nodes_of, kindly=st.booleans())
    def restart(self, number: int, kindly: bool) -> None:
        self.faulty[number].release()
        if kindly:
            self.faulty[number].disarm()
        self.nodes[number].close()
        assert self.nodes[number].poll() == []
        self.faulty[number] = FaultyBlobs(self.blobs, seed=self.job)
        self.nodes[number] = self.opened(number)

    # ---- always

    @invariant()
    def buffers_are_left_alone(self) -> None:
        for buffers, mark in getattr(self, "watched", ()):
            assert bytes(buffers._memory) == bytes((mark,)) * len(buffers._memory), "touched after the end"

    @invariant()
    def bounds_hold(self) -> None:
        for node in getattr(self, "nodes", ()):
            assert node._catalogue.block_count <= OPTIONS.catalogue_blocks
            assert (node.load_room, node.store_room) == (min(OPTIONS.pending_limit, OPTIONS.load_threads), 2)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        for number in range(NODES):
            self.repair(number)
        for _ in range(12):  # the breakers close by themselves, and what is damaged is stored anew
            self.clock.advance(61.0)
            for number in range(NODES):
                self.do_what_is_due(number)
        assert [node.describe()["store_fault"] for node in self.nodes] == [""] * NODES
        self.blobs.blobs.clear()
        for number in range(NODES):
            self.store(number, 0, 4, False)
            (place,) = self.nodes[number].places([make_key(0)])
            ends = self.load_from(number, keys_of(chain(0, 4)), place)
            assert [end.outcome for end in ends] == [Outcome.HIT] * 4
        for number in range(NODES):
            self.nodes[number].close()
        self.buffers_are_left_alone()


TestRemoteMachine = RemoteMachine.TestCase
TestRemoteMachine.settings = settings(
    max_examples=scale_examples(40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
