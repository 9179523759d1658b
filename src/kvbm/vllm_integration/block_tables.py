"""Which device blocks a request has, in every vLLM we serve."""

from __future__ import annotations

from typing import Any


class BlockTables:
    """vLLM ≥ 0.29 hands tables out with each step; before that they are rebuilt from the blocks that steps add.

    Valid between `update` and the end of `build_connector_meta`.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}
        self._state: Any = None

    def update(self, output: Any) -> None:
        """Take in a step."""
        self._state = getattr(output, "kv_connector_block_state", None)
        if self._state is not None:
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

    def get(self, request_id: str) -> list[int]:
        """The request's device blocks in order; empty when vLLM gives none."""
        if self._state is not None:
            found = self._state.get_block_ids(request_id)
            return found[0] if found else []
        return self._tables.get(request_id, [])

    def drop(self, request_id: str) -> None:
        self._tables.pop(request_id, None)
