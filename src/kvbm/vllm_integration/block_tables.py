"""Which device blocks a request has, in every vLLM we serve. It has thousands: no step lists them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload


class AllocatedBlocks(Sequence[int]):
    """The numbers of a request's device blocks, each looked up when it is asked for: a view of vLLM's list of blocks.

    vLLM only appends to that list while the request has its blocks, and leaves it as it is when it takes them back.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [block.block_id for block in self._blocks[index]]
        number: int = self._blocks[index].block_id
        return number


def tables_of(allocated: Any) -> Sequence[Sequence[int]]:
    """The block table of each group in a `KVCacheBlocks` of vLLM, whose own `get_block_ids` lists every block."""
    groups = getattr(allocated, "blocks", None)
    if groups is not None:
        return [AllocatedBlocks(group) for group in groups]
    numbers: Sequence[Sequence[int]] = allocated.get_block_ids()
    return numbers


def table_of(allocated: Any) -> Sequence[int]:
    """The block table of the first group."""
    groups = getattr(allocated, "blocks", None)
    return AllocatedBlocks(groups[0]) if groups is not None else tables_of(allocated)[0]


class BlockTables:
    """vLLM ≥ 0.29 hands tables out with each step; before that they are rebuilt from the blocks that steps add.

    Valid between `update` and the end of `build_connector_meta`.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}
        self._state: Any = None
        self._blocks_of: Callable[[str], Any] | None = None

    def update(self, output: Any) -> None:
        """Take in a step."""
        self._state = getattr(output, "kv_connector_block_state", None)
        if self._state is not None:
            # The step's state is a way to the cache manager's `get_block_ids`; its `get_blocks` lists nothing.
            manager = getattr(getattr(self._state, "resolve_block_ids", None), "__self__", None)
            self._blocks_of = getattr(manager, "get_blocks", None)
            return
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if added is None:
                continue
            if request_id in resumed:
                self._tables[request_id] = list(added[0])
            else:
                self._tables.setdefault(request_id, []).extend(added[0])

    def get(self, request_id: str) -> Sequence[int]:
        """The request's device blocks in order; empty when vLLM gives none."""
        if self._state is None:
            return self._tables.get(request_id, ())
        if self._blocks_of is not None and request_id in self._state.req_ids:
            return table_of(self._blocks_of(request_id))
        found = self._state.get_block_ids(request_id)
        return found[0] if found else ()

    def of_groups(self, request_id: str) -> Sequence[Sequence[int]]:
        """The request's table of each group, from a vLLM that hands them out; empty where it gives none."""
        if self._state is None or request_id not in self._state.req_ids:
            return ()
        if self._blocks_of is not None:
            return tables_of(self._blocks_of(request_id))
        tables: Sequence[Sequence[int]] = self._state.get_block_ids(request_id) or ()
        return tables

    @property
    def states(self) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """The recurrent states that this step leaves behind, by request: (group, device block, tokens) each."""
        return getattr(self._state, "boundary_state_offloads", None) or {}

    def drop(self, request_id: str) -> None:
        self._tables.pop(request_id, None)
