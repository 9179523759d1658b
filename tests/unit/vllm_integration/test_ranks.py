"""What ranks tell one another at the start of an engine, over groups of threads in place of processes."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="ranks talk through torch; torch is not installed")

from kvbm.errors import KvbmError
from kvbm.vllm_integration import ranks
from kvbm.vllm_integration.ranks import Node, find_node, gather, largest_shard

STAGES, WIDTH = 3, 2


class Group:
    """Some of the ranks, whose threads meet at a barrier."""

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20.0)

    def all_gather(self, gathered: list[Any], part: Any, index: int) -> None:
        self.parts[index] = part
        self._barrier.wait()
        gathered[:] = self.parts
        self._barrier.wait()


@pytest.fixture
def on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Calls a function on each rank of three stages with two ranks; what they return or raise."""
    here = threading.local()
    rows = [Group(WIDTH) for _ in range(STAGES)]
    columns = [Group(STAGES) for _ in range(WIDTH)]
    distributed = types.ModuleType("vllm.distributed")
    distributed.get_tp_group = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        cpu_group=(rows[here.rank // WIDTH], here.rank % WIDTH)
    )
    distributed.get_pp_group = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        cpu_group=(columns[here.rank % WIDTH], here.rank // WIDTH)
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setattr(
        ranks.torch.distributed,
        "all_gather_object",
        lambda gathered, part, group: group[0].all_gather(gathered, part, group[1]),
    )

    def call(function: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * (STAGES * WIDTH)

        def run(rank: int) -> None:
            here.rank = rank
            try:
                results[rank] = function(rank)
            except KvbmError as error:
                results[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return call


PARALLEL = SimpleNamespace(
    world_size=STAGES * WIDTH, tensor_parallel_size=WIDTH, pipeline_parallel_size=STAGES
)


def test_the_parts_come_in_the_order_of_the_ranks(on_all_ranks: Callable[..., list[Any]]) -> None:
    everyone = [b"rank %d" % rank for rank in range(STAGES * WIDTH)]
    assert on_all_ranks(lambda rank: gather(PARALLEL, b"rank %d" % rank)) == [everyone] * len(everyone)


def test_the_largest_shard_counts(on_all_ranks: Callable[..., list[Any]]) -> None:
    assert on_all_ranks(lambda rank: largest_shard(PARALLEL, 4096 * (1 + rank // WIDTH % 2))) == [8192] * 6


def test_a_stage_without_kv_is_told_to_all(on_all_ranks: Callable[..., list[Any]]) -> None:
    """Nobody waits for it."""
    said = on_all_ranks(lambda rank: largest_shard(PARALLEL, 0 if rank >= 4 else 4096))
    assert len(set(said)) == 1 and said[0].startswith("rank 4 of 6 has no layer that keeps KV")


def test_one_stage_asks_nobody() -> None:
    alone = SimpleNamespace(world_size=2, tensor_parallel_size=2, pipeline_parallel_size=1)
    assert largest_shard(alone, 4096) == 4096


# ---- nodes


def on_nodes(
    on_all_ranks: Callable[..., list[Any]], places: list[str], replicas: int = 1, directory: str = "/nowhere"
) -> list[Node]:
    """Where each rank is whose manager's socket has that name."""

    def find(rank: int) -> Node:
        parallel = SimpleNamespace(**vars(PARALLEL), rank=rank)
        return find_node(parallel, f"engine of {rank}", f"{directory}/{places[rank]}", replicas)

    found: list[Node] = on_all_ranks(find)
    return found


def test_ranks_that_find_one_manager_have_all_shards(on_all_ranks: Callable[..., list[Any]]) -> None:
    nodes = on_nodes(on_all_ranks, ["a"] * 6)
    assert set(nodes) == {Node("engine of 0", (0, 1, 2, 3, 4, 5), 0, 1, (0, 1, 2, 3, 4, 5), 6)}
    assert nodes[0].shards_in_words == ""
    assert [node.shard_of(rank, 1) for rank, node in enumerate(nodes)] == [0, 1, 2, 3, 4, 5]


def test_ranks_that_find_several_have_the_shards_of_their_own(on_all_ranks: Callable[..., list[Any]]) -> None:
    """Also where they are dealt out like cards; the engine's name is that of its first rank."""
    nodes = on_nodes(on_all_ranks, ["b", "a", "b", "a", "c", "b"])
    assert [node.part for node in nodes] == [0, 1, 0, 1, 2, 0]
    assert {node.engine for node in nodes} == {"engine of 0"}
    assert {node.part_count for node in nodes} == {3}
    assert nodes[5].ranks == (0, 2, 5)
    assert nodes[3].shards_in_words == "1 3 of 6"
    assert [node.shard_of(rank, 1) for rank, node in enumerate(nodes)] == [0, 0, 1, 1, 0, 2]
    assert all(node.stores(rank, 1) for rank, node in enumerate(nodes))


def test_of_ranks_with_the_same_bytes_one_on_each_node_stores(on_all_ranks: Callable[..., list[Any]]) -> None:
    """Three stages of two ranks with the same latent KV; the second stage is on both nodes."""
    nodes = on_nodes(on_all_ranks, ["a", "a", "a", "b", "b", "b"], replicas=2)
    assert [node.shards for node in nodes] == [(0, 1)] * 3 + [(1, 2)] * 3
    assert [node.shard_of(rank, 2) for rank, node in enumerate(nodes)] == [0, 0, 1, 0, 1, 1]
    stores = [node.stores(rank, 2) for rank, node in enumerate(nodes)]
    assert stores == [True, False, True, True, True, False]


def test_ranks_on_both_nodes_with_the_same_bytes_are_no_parts(on_all_ranks: Callable[..., list[Any]]) -> None:
    """Each node has the whole block: its bytes are those of an engine on one node."""
    nodes = on_nodes(on_all_ranks, ["a", "a", "a", "b", "b", "b"], replicas=6)
    assert {node.shards_in_words for node in nodes} == {""}
    assert [node.stores(rank, 6) for rank, node in enumerate(nodes)] == [True, False, False] * 2
