"""The public contract of a remote tier, on peers: what a test stores, another node's host memory gets."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.remote_contract import RemoteContract, chain, keys_of, load, store
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.tier import PeerTier
from kvbm.tiers.remote.contract import Buffers, RemoteTier
from rigs.movers import ModelNetwork, model_mover, moves, needs_nixl, nixl_mover
from rigs.peers import LendingNode, knows, open_tier, wait_until


class StoringPeer:
    """A peer tier, and a way to put blocks into the memory that it reads: a store ends when the tier knows of it."""

    store_blocks_max = 8

    def __init__(self, lender: LendingNode, tier: PeerTier, pending_limit: int) -> None:
        self._lender, self._tier, self._limit = lender, tier, pending_limit
        self._stored: list[Completion] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._both = select.epoll()
        self._both.register(self._event, select.EPOLLIN)
        self._both.register(tier.fileno(), select.EPOLLIN)
        self._closed = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    @property
    def store_room(self) -> int:
        return self._limit - len(self._stored)

    @property
    def store_fault(self) -> str:
        return ""

    def submit_store(
        self,
        job_id: int,
        blocks: Sequence[BlockHead],
        sources: Sequence[Buffers],
        tenant: str | None,
        tail: bool = False,
    ) -> Outcome:
        if self._closed:
            return Outcome.RETRY
        if not self.store_room:
            return Outcome.THROTTLED
        lender, keys = self._lender, [head.key for head in blocks]
        with lender.hold():
            pool = lender.space.host_pool
            new = [
                (head, shards)
                for head, shards in zip(blocks, sources, strict=True)
                if not pool.holds(head.key)
            ]
            for head, shards in new:
                slots = pool.reserve_chain([head.key], head.parent, 0.0, tail=tail)
                lender.fill(slots[0], [bytes(shard) for shard in shards])
                lender.space._names.reserved(slots, [head.key], head.engine_hash, 0, head.group)
                pool.commit_all(slots)
        wait_until(lambda: knows(self._tier, keys))
        ends = [BlockEnd(Outcome.HIT)] * len(blocks)
        self._stored.append(Completion.of(job_id, ends, lender.layout.block_bytes))
        os.eventfd_write(self._event, 1)
        return Outcome.PENDING

    def fileno(self) -> int:
        return self._both.fileno()

    def poll(self) -> list[Completion]:
        stored, self._stored = self._stored, []
        if stored:
            os.eventfd_read(self._event)
        return [*stored, *self._tier.poll()]

    def close(self) -> None:
        self._closed = True
        self._tier.close()


class TestPeerTier(RemoteContract):
    lends: Mover | None = None
    reads: Mover | None = None

    @pytest.fixture(autouse=True)
    def lenders(self) -> Iterator[dict[Namespace, LendingNode]]:
        self.by_namespace: dict[Namespace, LendingNode] = {}
        yield self.by_namespace
        for lender in self.by_namespace.values():
            lender.close()

    def make_remote(
        self, tmp_path: Path, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> RemoteTier:
        if namespace not in self.by_namespace:
            self.by_namespace[namespace] = LendingNode(layout=layout, namespace=namespace, mover=self.lends)
        lender = self.by_namespace[namespace]
        # All nodes' lenders are in the directory, those of another namespace too: they refuse.
        peers = [each.peer for each in self.by_namespace.values()]
        tier = open_tier(peers, layout, namespace, mover=self.reads, pending_limit=pending_limit)
        if self.reads is not None:
            wait_until(lambda: moves(lender, tier), "the lender knows the reader's memory")
        return StoringPeer(lender, tier, pending_limit)  # type: ignore[return-value]

    def test_news_names_each_block_once(self, tier: RemoteTier) -> None:
        """It stores nothing itself, so a block is news when it was loaded."""
        store(tier, self.layout, chain(0, 2))
        assert not tier.news().came
        for _ in range(2):
            load(tier, self.layout, keys_of(chain(0, 1)), tier.places(keys_of(chain(0, 1)))[0])
        assert (list(tier.news().came), list(tier.news().came)) == (keys_of(chain(0, 1)), [])


@pytest.fixture(scope="module")
def model_movers() -> Iterator[tuple[Mover, Mover]]:
    network = ModelNetwork()
    yield from pair(model_mover(network), model_mover(network))


@pytest.fixture(scope="module")
def nixl_movers() -> Iterator[tuple[Mover, Mover]]:
    yield from pair(nixl_mover(), nixl_mover())


def pair(lends: Mover, reads: Mover) -> Iterator[tuple[Mover, Mover]]:
    yield lends, reads
    lends.close()
    reads.close()


class TestPeerTierWithModelMovers(TestPeerTier):
    @pytest.fixture(autouse=True)
    def movers(self, model_movers: tuple[Mover, Mover]) -> None:
        self.lends, self.reads = model_movers

    def test_blocks_come_by_the_mover(self, tier: RemoteTier) -> None:
        store(tier, self.layout, chain(0, 2))
        load(tier, self.layout, keys_of(chain(0, 2)), tier.places(keys_of(chain(0, 1)))[0])
        assert sum(lender.server.counts["moved"] for lender in self.by_namespace.values()) == 2


@needs_nixl
class TestPeerTierWithNixl(TestPeerTierWithModelMovers):
    @pytest.fixture(autouse=True)
    def movers(self, nixl_movers: tuple[Mover, Mover]) -> None:
        self.lends, self.reads = nixl_movers
