"""Routers choose a node for each request: by chance, in turn, by conversation, or by the blocks on each and its load.

`cluster` reports to them what the nodes store and evict. Every one of them gives the same answers for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy


class Loads:
    """The nodes' work as routers know it, in blocks; numpy arrays by node.

    `active`: prompts of all requests that have not ended. `waiting`: the blocks of them that are still to be computed,
    as the router estimated when it sent them.
    """

    def __init__(self, node_count: int) -> None:
        self.active: Any = numpy.zeros(node_count)
        self.waiting: Any = numpy.zeros(node_count)


class Router(Protocol):
    """Chooses nodes. `stored` and `removed` report what nodes hold, as the nodes' own events do.

    With `listens` False they need not be called.
    """

    listens: bool

    def choose(self, conversation: int, blocks: Sequence[int]) -> tuple[int, int]:
        """The node for a request, and how many of its first blocks the router believes to be there."""

    def stored(self, node: int, blocks: Iterable[int]) -> None:
        """The node holds these blocks from now on; it held none of them."""

    def removed(self, node: int, blocks: Iterable[int]) -> None:
        """The node holds these blocks no more."""


class _Blind:
    """A router that does not ask what nodes hold."""

    listens = False

    def stored(self, node: int, blocks: Iterable[int]) -> None:
        pass

    def removed(self, node: int, blocks: Iterable[int]) -> None:
        pass


class RandomRouter(_Blind):
    """Any node, all with the same chance."""

    def __init__(self, node_count: int, seed: int) -> None:
        self._node_count = node_count
        self._chance = random.Random(seed)

    def choose(self, conversation: int, blocks: Sequence[int]) -> tuple[int, int]:
        """A node drawn by chance."""
        return int(self._chance.random() * self._node_count), 0


class RoundRobin(_Blind):
    """One after the other."""

    def __init__(self, node_count: int) -> None:
        self._node_count = node_count
        self._next = 0

    def choose(self, conversation: int, blocks: Sequence[int]) -> tuple[int, int]:
        """The node after the last one chosen."""
        node, self._next = self._next, (self._next + 1) % self._node_count
        return node, 0


class SessionAffine(_Blind):
    """A conversation stays on one node, drawn by chance."""

    def __init__(self, node_count: int, seed: int) -> None:
        self._node_count = node_count
        self._seed = seed

    def choose(self, conversation: int, blocks: Sequence[int]) -> tuple[int, int]:
        """The conversation's node."""
        return random.Random(f"{self._seed} {conversation}").randrange(self._node_count), 0


class PrefixIndex:
    """Which nodes hold a block, for all blocks at once: a bit for each node.

    A request is answered by one walk down its chain, whatever the number of nodes.
    """

    def __init__(self, node_count: int) -> None:
        self._everyone = (1 << node_count) - 1
        # Blocks that only one node holds, which is most, share that node's number.
        self._bits = [1 << node for node in range(node_count)]
        self._holders: dict[int, int] = {}

    def stored(self, node: int, blocks: Iterable[int]) -> None:
        """The node holds the blocks."""
        bit, holders = self._bits[node], self._holders
        for block in blocks:
            known = holders.get(block)
            holders[block] = bit if known is None else known | bit

    def removed(self, node: int, blocks: Iterable[int]) -> None:
        """The node does not hold the blocks any more; it held every one."""
        bit, holders = self._bits[node], self._holders
        for block in blocks:
            left = holders[block] ^ bit
            assert not left & bit, "the node held the block"
            if left:
                holders[block] = left
            else:
                del holders[block]

    def stretches(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """The chain in stretches that the same nodes hold from its first block on: (bits of the nodes, blocks).

        How many of the first blocks a node holds is the sum over the stretches that have its bit.
        """
        found = []
        nodes, length = self._everyone, 0
        for held in map(self._holders.get, blocks, repeat(0)):
            still = held & nodes
            if still != nodes:
                if length:
                    found.append((nodes, length))
                if not still:
                    return found
                nodes, length = still, 0
            length += 1
        if length:
            found.append((nodes, length))
        return found

    def __len__(self) -> int:
        return len(self._holders)


class KvAware:
    """The node on which a request costs least: NVIDIA Dynamo's cost function, with exact knowledge of the nodes.

    cost = blocks waiting to be computed + own blocks to compute there + active blocks, own ones included
    ("Router Design" in Dynamo's documentation). The least cost wins, equal ones by chance.
    """

    listens = True

    def __init__(self, node_count: int, loads: Loads, seed: int) -> None:
        self._node_count = node_count
        self._loads = loads
        self._chance = random.Random(seed)
        self._everyone = (1 << node_count) - 1
        self.index = PrefixIndex(node_count)
        self.stored = self.index.stored
        self.removed = self.index.removed

    def choose(self, conversation: int, blocks: Sequence[int]) -> tuple[int, int]:
        """The cheapest node."""
        costs = self._loads.waiting + self._loads.active
        stretches = self.index.stretches(blocks)
        for nodes, length in stretches:
            # Blocks that all nodes hold make no difference.
            if nodes == self._everyone:
                continue
            if not nodes & (nodes - 1):
                costs[nodes.bit_length() - 1] -= length
            else:
                costs -= length * self._as_array(nodes)
        node = _least(costs, self._chance)
        return node, sum(length for nodes, length in stretches if nodes >> node & 1)

    def _as_array(self, nodes: int) -> Any:
        """A 1 for every bit."""
        packed = numpy.frombuffer(nodes.to_bytes((self._node_count + 7) // 8, "little"), numpy.uint8)
        return numpy.unpackbits(packed, count=self._node_count, bitorder="little")


ROUTERS: dict[str, Callable[[int, Loads, int], Router]] = {
    "random": lambda nodes, loads, seed: RandomRouter(nodes, seed),
    "round-robin": lambda nodes, loads, seed: RoundRobin(nodes),
    "session": lambda nodes, loads, seed: SessionAffine(nodes, seed),
    "kv": KvAware,
}
"""By name: nodes, their loads, and a seed."""


def _least(costs: Any, chance: random.Random) -> int:
    """A place of the smallest number: any of them, so that equal nodes share what comes."""
    least = int(costs.argmin())
    equal = numpy.flatnonzero(costs == costs[least])
    return least if len(equal) == 1 else int(equal[int(chance.random() * len(equal))])
