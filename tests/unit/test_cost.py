"""Whether loading is worth it: by what was measured, and doubted now and then."""

from __future__ import annotations

import pytest

from kvbm.block import Tier
from kvbm.leader.cost import CostModel

HOST, DISK = bytes([Tier.HOST]), bytes([Tier.DISK])


def test_what_is_unknown_is_tried() -> None:
    cost = CostModel(16)
    assert cost.worth_loading(HOST * 5) == 5
    assert cost.load_s(HOST) is None
    assert cost.prefill_s(1) is None
    cost.prefilled(1000, 1.0)
    assert cost.worth_loading(DISK) == 1
    assert cost.load_s(b"") == 0.0
    assert cost.worth_loading(b"") == 0


def test_each_tier_is_priced_by_itself_and_a_prefix_may_be_loaded_alone() -> None:
    cost = CostModel(10)
    cost.prefilled(1000, 1.0)  # 0.01 s a block
    cost.loaded(HOST * 10, 0.01)
    cost.loaded(HOST * 5 + DISK * 5, 1.005)  # 0.001 s a host block, so 0.2 s a disk block
    assert cost.load_s(DISK) == pytest.approx(0.2)
    assert cost.worth_loading(HOST * 20) == 20
    assert cost.worth_loading(HOST * 19 + DISK) == 19
    assert cost.worth_loading(HOST * 60 + DISK) == 61
    assert cost.worth_loading(DISK * 5) == 0


def test_a_no_is_checked_again_now_and_then() -> None:
    cost = CostModel(10)
    cost.prefilled(1000, 1.0)
    cost.loaded(DISK, 1.0)
    answers = [cost.worth_loading(DISK) for _ in range(64)]
    assert 0 < answers.count(1) <= 8
    assert set(answers) == {0, 1}


def test_the_averages_follow() -> None:
    cost = CostModel(10)
    for _ in range(40):
        cost.prefilled(100, 1.0)
    assert cost.prefill_s(10) == pytest.approx(1.0)
    for _ in range(40):
        cost.prefilled(100, 2.0)
    assert cost.prefill_s(10) == pytest.approx(2.0, rel=0.01)


def test_what_says_nothing_is_left_out() -> None:
    cost = CostModel(10)
    cost.prefilled(1, 5.0)
    cost.prefilled(1000, 0.0)
    cost.loaded(b"", 1.0)
    cost.loaded(HOST, 0.0)
    assert cost.prefill_s(1) is None
    assert cost.load_s(HOST) is None
