"""The ranks of an engine, which compute parts of its layers, or some of them: what they tell one another at the start.

Each rank has its shard of every block. The shards of a block have one size in the tiers, that of the rank with the
most layers. Ranks on several nodes find several managers; each has the shards of its own ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvbm.client.place import name_of_place
from kvbm.errors import KvbmError


class Node(NamedTuple):
    """The ranks that find one manager, part number `part` of `part_count`; and how their `engine` is called.

    `shards` are those of a block, of `shard_count`, that these ranks hold. Those of a rank and the layout's are counted
    within them, and of ranks that hold the same one, one stores it.
    """

    engine: str
    ranks: tuple[int, ...]
    part: int
    part_count: int
    shards: tuple[int, ...]
    shard_count: int

    def shard_of(self, rank: int, replicas: int) -> int:
        """Which of the node's shards a rank holds, where so many hold the same."""
        return self.shards.index(rank // replicas)

    def stores(self, rank: int, replicas: int) -> bool:
        """Whether this rank is the one that stores its shard."""
        return rank == min(other for other in self.ranks if other // replicas == rank // replicas)

    @property
    def shards_in_words(self) -> str:
        """Which shards these are; empty where they are all."""
        if len(self.shards) == self.shard_count:
            return ""
        return f"{' '.join(map(str, self.shards))} of {self.shard_count}"


def find_node(parallel: Any, engine: str, socket_path: str, replicas: int) -> Node:
    """Where this rank is. Every rank calls this at the same point; `replicas` of them hold the same bytes.

    Ranks that find the same manager are a part of the engine, and parts are counted by their first ranks. The engine's
    name is that of rank 0, which has the scheduler on its node: other nodes may have made up others.
    """
    said = gather(parallel, json.dumps([engine, name_of_place(socket_path)]).encode())
    places = [tuple(json.loads(each)) for each in said]
    found = [place for _, place in places]
    order = list(dict.fromkeys(found))
    mine = found[int(parallel.rank)]
    ranks = tuple(rank for rank, place in enumerate(found) if place == mine)
    return Node(
        engine=str(places[0][0]),
        ranks=ranks,
        part=order.index(mine),
        part_count=len(order),
        shards=tuple(sorted({rank // replicas for rank in ranks})),
        shard_count=len(found) // replicas,
    )


def gather(parallel: Any, part: bytes) -> list[bytes]:
    """The parts of all ranks, in their order: stage by stage. Every rank calls this at the same point.

    Raises KvbmError in one line where a rank cannot be heard.
    """
    gathered = [part]
    if int(parallel.world_size) == 1:
        return gathered
    from vllm.distributed import get_pp_group, get_tp_group

    groups: tuple[tuple[int, Callable[[], Any]], ...] = (
        (int(parallel.tensor_parallel_size), get_tp_group),
        (int(parallel.pipeline_parallel_size), get_pp_group),
    )
    for size, group in groups:
        if size == 1:
            continue
        everyone: list[list[bytes]] = [[]] * size
        try:
            torch.distributed.all_gather_object(everyone, gathered, group=group().cpu_group)
        except RuntimeError as error:
            text = " ".join(str(error).split())
            raise KvbmError(f"the ranks' parts could not be gathered: {text}") from None
        gathered = [each for parts in everyone for each in parts]
    return gathered


def largest_shard(parallel: Any, shard_bytes: int) -> int:
    """The bytes of a block in the rank that has most of it: stages of a pipeline may have more layers than others.

    `shard_bytes` is 0 in a rank whose layers keep no KV: it can hold no shard. Raises KvbmError in one line then, in
    every rank.
    """
    if int(parallel.world_size) == 1 or int(parallel.pipeline_parallel_size) == 1:
        return shard_bytes
    gathered = gather(parallel, shard_bytes.to_bytes(8, "big"))
    sizes = [int.from_bytes(size, "big") for size in gathered]
    if 0 in sizes:
        raise KvbmError(
            f"rank {sizes.index(0)} of {len(sizes)} has no layer that keeps KV; accepted are stages that all have one"
        )
    return max(sizes)


def context_parallel(vllm_config: Any) -> int:
    """How many ranks share the tokens of a block."""
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))


def block_tokens(vllm_config: Any, spec: Any) -> int:
    """The tokens of a block of all ranks: where they share its tokens, the specification has those of one rank."""
    sharing = context_parallel(vllm_config) if getattr(spec, "dcp_sharded", True) else 1
    return int(spec.block_size) * sharing
