"""A request between its match and its end: which of its blocks are complete, and where they lie."""

from __future__ import annotations

from typing import Any

import pytest

from kvbm.hashing import Chain
from kvbm.trtllm_integration.served import Served
from rigs.trtllm.package import RequestData


def served(tokens: int = 18, **facts: Any) -> Served:
    return Served("1", Chain.under(bytes(32), 4, range(tokens), lambda block: b""), tokens, **facts)


def data(position: int, scheduled: int, blocks: list[int] | None = None, **more: Any) -> RequestData:
    return RequestData(1, [], blocks or [], position, scheduled, **more)


def test_what_was_promised_counts_where_the_engine_takes_it_up_as_a_whole() -> None:
    request = served(computed=1, promised=2, table=list(range(5)))
    request.advance(data(4, 6), 4, flat=True, first=True)
    assert request.position == 18
    assert request.complete_blocks(4) == 4


def test_what_the_engine_may_compute_itself_does_not_count_before_it_says_so() -> None:
    request = served(computed=1, promised=2, table=list(range(5)))
    request.advance(data(4, 6), 4, flat=False, first=True)
    assert request.complete_blocks(4) == 2
    request.advance(data(12, 6), 4, flat=False, first=False)
    assert request.complete_blocks(4) == 4


def test_a_position_that_holds_the_promise_already_is_not_counted_twice() -> None:
    request = served(tokens=40, computed=1, promised=2, table=list(range(10)))
    request.advance(data(12, 6), 4, flat=True, first=True)
    assert request.position == 18


def test_guesses_are_not_counted() -> None:
    request = served(tokens=18, table=list(range(6)))
    request.advance(data(17, 4), 4, flat=True, first=False)
    assert request.position == 18


def test_a_block_without_memory_ends_what_is_stored() -> None:
    request = served(table=[5, -1, 7, 8, 9], position=18)
    assert request.complete_blocks(4) == 1


def test_the_first_block_of_low_priority_ends_it_for_good() -> None:
    request = served(table=list(range(5)), position=18)
    request.note_priorities([40, 40], 0, 35)
    assert request.complete_blocks(4) == 4
    request.note_priorities([40, 20, 90], 2, 35)
    assert request.complete_blocks(4) == 3
    request.note_priorities([90], 5, 35)
    assert request.complete_blocks(4) == 3


@pytest.mark.parametrize(
    ("allocated", "told", "new", "table"),
    [
        ([1, 2, 3], [1, 2, 3], True, [1, 2, 3]),
        ([1, 2], [1, 2, 3], True, [1, 2, 3]),  # allocated chunk by chunk
        ([1, 2, 3], [3], False, [1, 2, 3]),  # run again: the engine tells what is new alone
        ([1, 2, 3], [], False, [1, 2, 3]),
        (None, [1, 2, 3], True, [1, 2, 3]),
        (None, [3], False, None),
        ([1, 2, 3], [7, 8, 9], True, None),
    ],
)
def test_the_block_table_of_a_first_report(
    allocated: list[int] | None, told: list[int], new: bool, table: list[int] | None
) -> None:
    request = served(allocated=allocated)
    assert request.first_report(data(0, 4, told), new) == (table is not None)
    assert request.table == (table or [])
