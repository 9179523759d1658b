"""A request's device blocks, as each vLLM hands them out: the asked ones and no others are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.vllm_integration.block_tables import BlockTables, table_of


class Block:
    """A device block that counts how often it is looked at."""

    looks = 0

    def __init__(self, number: int) -> None:
        self._number = number

    @property
    def block_id(self) -> int:
        Block.looks += 1
        return self._number


class CacheManager:
    """vLLM's, as far as a step's block state reaches it."""

    def __init__(self, tables: dict[str, list[int]]) -> None:
        self._blocks = {request: [Block(number) for number in table] for request, table in tables.items()}

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=(self._blocks.get(request_id, ()),))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return ([block.block_id for block in self._blocks[request_id]],)


def state(resolve: Any, *requests: str) -> Any:
    """A step's block state, as vLLM 0.32 has it."""

    def get_block_ids(request_id: str) -> Any:
        return resolve(request_id) if request_id in requests else None

    return SimpleNamespace(
        req_ids=set(requests),
        resolve_block_ids=resolve,
        get_block_ids=get_block_ids,
        boundary_state_offloads={},
    )


def after(block_state: Any) -> BlockTables:
    tables = BlockTables()
    tables.update(SimpleNamespace(kv_connector_block_state=block_state))
    return tables


def test_only_the_asked_blocks_are_looked_at() -> None:
    manager = CacheManager({"r": list(range(1000, 9192))})
    table = after(state(manager.get_block_ids, "r")).get("r")
    Block.looks = 0
    assert (len(table), table[8190:]) == (8192, [9190, 9191])
    assert (table[8000:8002], table[-1], table[9000:]) == ([9000, 9001], 9191, [])
    assert Block.looks == 5


def test_blocks_that_the_engine_adds_later_are_seen() -> None:
    """vLLM's own lists: a table is of the moment at which it is read."""
    blocks: list[Any] = [Block(3)]
    table = table_of(SimpleNamespace(blocks=(blocks,)))
    blocks.append(Block(5))
    assert list(table) == [3, 5]


def test_a_request_outside_the_step_has_no_table() -> None:
    manager = CacheManager({"r": [1, 2], "s": [3]})
    tables = after(state(manager.get_block_ids, "r"))
    assert list(tables.get("s")) == []
    assert list(tables.get("never seen")) == []
    assert list(after(state(manager.get_block_ids, "new")).get("new")) == [], "nothing is allocated yet"


@pytest.mark.parametrize(
    "block_state",
    [
        state(lambda request_id: ([4, 5, 6],), "r"),
        SimpleNamespace(get_block_ids=lambda request_id: ([4, 5, 6],) if request_id == "r" else None),
    ],
    ids=["resolved by a function", "knows the tables itself"],
)
def test_a_vllm_that_only_lists_tables_is_asked_for_the_list(block_state: Any) -> None:
    tables = after(block_state)
    assert tables.get("r")[1:] == [5, 6]
    assert list(tables.get("s")) == []


def test_an_allocation_that_only_lists_its_blocks_is_asked_for_the_list() -> None:
    assert table_of(SimpleNamespace(get_block_ids=lambda: ([7, 8],)))[1:] == [8]


def step(
    new: Sequence[Any] = (), ids: Sequence[str] = (), added: Sequence[Any] = (), resumed: Sequence[str] = ()
) -> Any:
    """A step's output, as vLLM before 0.29 has it."""
    cached = SimpleNamespace(req_ids=ids, new_block_ids=added, resumed_req_ids=set(resumed))
    return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)


def test_an_older_vllm_tells_what_each_step_adds() -> None:
    tables = BlockTables()
    tables.update(step(new=[SimpleNamespace(req_id="r", block_ids=([1, 2],))]))
    tables.update(step(ids=["r"], added=[([3],)]))
    tables.update(step(ids=["r"], added=[None]))
    assert tables.get("r")[1:] == [2, 3]
    tables.update(step(ids=["r"], added=[([8, 9],)], resumed=["r"]))
    assert list(tables.get("r")) == [8, 9]
    tables.drop("r")
    assert list(tables.get("r")) == []
