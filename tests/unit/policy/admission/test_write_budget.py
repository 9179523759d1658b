"""The write budget: how many bytes a day pass, and what is given back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.block import BlockKey
from kvbm.policy.admission.filter import AdmitAll, DiskFilter
from kvbm.policy.admission.write_budget import DAY_S, WriteBudget
from rigs.property_tests import scale_examples


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def test_the_budget_is_a_24th_at_once_and_the_rest_over_the_day() -> None:
    budget = WriteBudget(AdmitAll(), bytes_per_day=240, block_bytes=1)
    assert [budget.offered(key(i), 0.0) for i in range(11)] == [True] * 10 + [False]
    assert budget.refused_last
    # 230 bytes over the day: one every 376 seconds.
    assert not budget.offered(key(1), DAY_S / 230 * 0.99)
    assert budget.offered(key(1), DAY_S / 230 * 1.01)
    assert not budget.refused_last
    assert [budget.offered(key(i), DAY_S) for i in range(11)] == [True] * 10 + [False], (
        "it is saved up no further"
    )


@settings(max_examples=scale_examples(200))
@given(
    st.integers(2, 100),
    st.integers(1, 7),
    st.lists(st.sampled_from([0.0, 1.0, 600.0, 3600.0, 40_000.0]), max_size=200),
)
def test_no_day_exceeds_the_budget(blocks: int, block_bytes: int, pauses: list[float]) -> None:
    budget, now_s, written = WriteBudget(AdmitAll(), blocks * block_bytes, block_bytes), 0.0, []
    for pause_s in pauses:
        now_s += pause_s
        if budget.offered(key(0), now_s):
            written.append(now_s)
    for first_s in written:
        assert (
            sum(block_bytes for at_s in written if first_s <= at_s < first_s + DAY_S) <= blocks * block_bytes
        )


def test_the_policy_inside_counts_what_the_budget_refuses() -> None:
    budget = WriteBudget(DiskFilter(), bytes_per_day=2, block_bytes=1)
    assert not budget.offered(key(1), 0.0)
    assert not budget.refused_last, "the filter refused it"
    assert budget.offered(key(1), 0.0)
    assert not budget.offered(key(2), 0.0)
    assert not budget.offered(key(2), 0.0)
    assert budget.refused_last
    assert not budget.offered(key(3), DAY_S)
    budget.hit(key(3), DAY_S)
    assert budget.offered(key(3), DAY_S), "a hit counts inside"


def test_what_is_not_written_is_given_back() -> None:
    budget = WriteBudget(AdmitAll(), bytes_per_day=48, block_bytes=1)
    assert budget.offered(key(1), 0.0)
    for _ in range(9):
        budget.refund()
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False], "never more than the burst"


def test_a_budget_that_could_never_refill_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"bytes_per_day=19 cannot be used: at least 20, 2 blocks of 10 bytes"
    ):
        WriteBudget(AdmitAll(), bytes_per_day=19, block_bytes=10)
    budget = WriteBudget(AdmitAll(), bytes_per_day=20, block_bytes=10)
    assert [budget.offered(key(1), at_s) for at_s in (0.0, 0.0, DAY_S, DAY_S)] == [True, False, True, False]
