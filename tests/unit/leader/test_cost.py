"""Whether loading is worth it, and how much of it: by what was measured, and doubted now and then."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import Tier
from kvbm.leader.cost import CostModel, PrefillFit

HOST, DISK = bytes([Tier.HOST]), bytes([Tier.DISK])


def known(cost: CostModel, sources: bytes, seconds: float) -> None:
    """Loads enough to be believed, all alike."""
    for _ in range(3):
        cost.loaded(sources, seconds)


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
    known(cost, HOST * 10, 0.01)
    known(cost, HOST * 5 + DISK * 5, 1.005)  # 0.001 s a host block, so 0.2 s a disk block
    assert cost.load_s(DISK) == pytest.approx(0.2)
    assert cost.worth_loading(HOST * 20) == 20
    assert cost.worth_loading(HOST * 19 + DISK) == 19
    assert cost.worth_loading(HOST * 60 + DISK) == 60, "not the last one, however much the others save"
    assert cost.worth_loading(DISK * 5) == 0
    assert cost.worth_loading(DISK + HOST * 40) == 41, "a slow block may lie before many fast ones"
    assert cost.worth_loading(DISK + HOST * 20) == 0, "0.22 s of loading against 0.21 s of computing"
    assert cost.worth_loading(HOST * 4 + DISK * 2 + HOST * 30) == 4
    assert cost.worth_loading(HOST * 4 + DISK * 2 + HOST * 50) == 56


def test_computing_takes_longer_the_deeper_it_is() -> None:
    """10 µs a token, and 1 ns more for each token before it: 100 tokens take 1 ms at 0 and 2 ms at 10,000."""
    cost = CostModel(100)
    cost.prefilled(2000, 2000 * 11e-6, 1000.0)
    cost.prefilled(2000, 2000 * 13e-6, 3000.0)
    assert cost.prefill_s(1) == pytest.approx(100 * (10e-6 + 50e-9))
    assert cost.prefill_s(1, 100) == pytest.approx(100 * (10e-6 + 10_050e-9))
    assert cost.prefill_s(100) == pytest.approx(10_000 * (10e-6 + 5_000e-9))


def test_loading_stops_at_the_depth_from_which_computing_is_cheaper() -> None:
    """A disk block takes 1.5 ms to load. A block takes 1.005 ms to compute at the beginning and 2.005 after 100."""
    cost = CostModel(100)
    cost.prefilled(2000, 2000 * 11e-6, 1000.0)
    cost.prefilled(2000, 2000 * 13e-6, 3000.0)
    known(cost, HOST * 100, 0.01)  # 0.1 ms
    known(cost, DISK * 10, 0.015)
    assert cost.worth_loading(DISK * 40) == 0, "40 blocks: 60 ms of loading, 48 of computing"
    assert cost.worth_loading(DISK * 120) == 120, "180 ms of loading, 192 of computing"
    assert cost.worth_loading(DISK * 40, first=100) == 40, "the same 40 blocks, deep in a prompt"
    assert cost.worth_loading(HOST * 20 + DISK * 40) == 20, "60 ms of loading, 56 of computing"
    assert cost.worth_loading(HOST * 40 + DISK * 40) == 80, "60 ms of loading, 64 of computing"


@given(st.lists(st.sampled_from([HOST, DISK]), max_size=40), st.integers(0, 50), st.floats(0.0005, 0.003))
def test_the_cut_is_the_best_of_all(run: list[bytes], first: int, disk_s: float) -> None:
    cost = CostModel(100)
    cost.prefilled(2000, 2000 * 11e-6, 1000.0)
    cost.prefilled(2000, 2000 * 13e-6, 3000.0)
    known(cost, HOST, 0.0011)
    known(cost, DISK, disk_s)
    sources = b"".join(run)

    def seconds(depth: int) -> float:
        load_s, prefill_s = cost.load_s(sources[:depth]), cost.prefill_s(len(sources) - depth, first + depth)
        assert load_s is not None
        assert prefill_s is not None
        return load_s + prefill_s

    chosen = cost.worth_loading(sources, first)
    assert seconds(chosen) == pytest.approx(min(map(seconds, range(len(sources) + 1))), abs=1e-12)


def test_a_no_is_checked_again_now_and_then() -> None:
    cost = CostModel(10)
    cost.prefilled(1000, 1.0)
    known(cost, DISK, 1.0)
    answers = [cost.worth_loading(DISK) for _ in range(64)]
    assert 0 < answers.count(1) <= 8
    assert set(answers) == {0, 1}
    known(cost, HOST, 1e-6)
    assert {cost.worth_loading(HOST + DISK) for _ in range(64)} == {1, 2}


@pytest.mark.parametrize(
    ("load_s", "prefill_s", "slow_s"),
    [(0.00040, 0.00794, 0.02585), (0.00017, 0.01061, 0.02249), (0.00007, 0.00109, 0.00205)],
    ids=["228 tokens", "6 layers", "2 layers"],
)
@pytest.mark.parametrize("at", range(8))
def test_a_load_that_waited_for_a_processor_refuses_none_that_pays(
    load_s: float, prefill_s: float, slow_s: float, at: int
) -> None:
    """Measured on two cores that others shared, seconds a block: what loads and computing took, and the slowest load
    of each run, fifteen to a hundred times as long as the others. It may come at any time, first of all."""
    cost = CostModel(128)
    cost.prefilled(1280, 10 * prefill_s, 640.0)
    for number in range(24):
        assert cost.worth_loading(HOST * 8) == 8, number
        cost.loaded(HOST * 8, 8 * (slow_s if number in (at, at + 3) else load_s))


def test_loads_that_are_always_slow_are_refused_and_one_that_is_fast_is_believed() -> None:
    cost = CostModel(10)
    cost.prefilled(1000, 1.0)  # 0.01 s a block
    for _ in range(3):
        assert cost.worth_loading(DISK) == 1
        cost.loaded(DISK, 0.1)
    assert cost.worth_loading(DISK) == 0
    cost.loaded(DISK, 0.001)  # the sixteenth that is tried all the same, say
    assert cost.worth_loading(DISK) == 1
    cost.loaded(DISK, 0.1)
    assert cost.worth_loading(DISK) == 0, "that was chance"


def test_steps_that_tilt_the_line_do_not_make_the_first_blocks_free() -> None:
    """Short tails behind long hits, each in a step that takes its time, beside a cold prompt now and then."""
    fit = PrefillFit()
    for _ in range(20):
        fit.add(1000, 0.05, 500.0)
        fit.add(100, 0.1, 9000.0)
    mean = (20 * 0.05 + 20 * 0.1) / (20 * 1100)
    assert fitted(fit, 0) > 0.05 * mean


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
    cost.prefilled(1000, 1.0, -1.0)
    cost.loaded(b"", 1.0)
    cost.loaded(HOST, 0.0)
    assert cost.prefill_s(1) is None
    assert cost.load_s(HOST) is None


def test_the_deepest_tier_pays_for_what_the_others_do_not_explain() -> None:
    cost = CostModel(10)
    known(cost, HOST * 4, 0.4)
    known(cost, HOST * 2 + DISK * 2, 1.2)  # 0.2 of it are the host's
    assert cost.load_s(HOST + DISK) == pytest.approx(0.6)
    cost.loaded(HOST * 4 + DISK, 0.1)  # faster than the host's share alone
    assert cost.load_s(DISK) == 0.0
    known(cost, HOST * 4 + DISK, 0.9)
    assert cost.load_s(DISK) == pytest.approx(0.5)


# ---- the line through the steps


def fitted(fit: PrefillFit, position: int) -> float:
    seconds = fit.span_s(position, position + 1)
    assert seconds is not None
    return seconds


def test_steps_that_are_all_equally_deep_keep_what_is_known_of_depth() -> None:
    fit = PrefillFit()
    fit.add(1000, 1.0, 500.0)
    fit.add(1000, 2.0, 10_500.0)
    for _ in range(500):
        fit.add(1000, 3.0, 10_500.0)
    assert fitted(fit, 10_500) == pytest.approx(3e-3, rel=1e-3)
    assert fitted(fit, 500) == pytest.approx(1e-3, rel=1e-2)


def test_without_spread_there_is_no_slope() -> None:
    fit = PrefillFit()
    for noise in range(20):
        fit.add(1000, 1.0 + noise % 2, 5000.0 + noise % 2)
    assert fitted(fit, 0) == fitted(fit, 20_000)


def test_a_step_counts_as_much_as_it_computes() -> None:
    """After a hit come a few tokens, deep, in a step that takes its time whatever is in it."""
    fit = PrefillFit()
    for _ in range(10):
        for position in (1000.0, 3000.0, 5000.0):
            fit.add(2000, 0.2, position)
        fit.add(80, 0.02, 8000.0)  # 2.5 times as long for each token
    assert fitted(fit, 8000) < 1.4e-4


def test_no_token_takes_less_than_nothing() -> None:
    rising, falling = PrefillFit(), PrefillFit()
    rising.add(1000, 0.001, 5000.0)
    rising.add(1000, 1.0, 6000.0)
    assert fitted(rising, 0) >= 0.0
    assert fitted(rising, 8000) > fitted(rising, 100)
    falling.add(1000, 1.0, 0.0)
    falling.add(1000, 0.1, 9000.0)
    assert fitted(falling, 100_000) == fitted(falling, 0) > 0.0


def test_it_finds_the_line_behind_noisy_steps() -> None:
    noise, fit = random.Random(7), PrefillFit()
    for _ in range(300):
        tokens, position = noise.randrange(64, 8192), noise.uniform(0.0, 60_000.0)
        fit.add(tokens, tokens * (30e-6 + 1e-9 * position) * noise.uniform(0.95, 1.05), position)
    assert fitted(fit, 0) == pytest.approx(30e-6, rel=0.15)
    assert fitted(fit, 60_000) == pytest.approx(90e-6, rel=0.1)


def test_a_long_queue_before_the_disk_decides_as_slow_loads_do() -> None:
    cost = CostModel(10)
    cost.prefilled(1000, 1.0)  # 0.01 s a block
    assert cost.worth_loading(DISK * 10, arrival_s=0.09) == 10
    assert cost.worth_loading(DISK * 10, arrival_s=0.11) == 0, "no load was measured, but its queue is known"
    known(cost, HOST * 10, 0.01)
    known(cost, DISK * 10, 0.05)
    assert cost.worth_loading(HOST * 5 + DISK * 10, arrival_s=0.0) == 15
    assert cost.worth_loading(HOST * 5 + DISK * 10, arrival_s=0.5) == 5, "those in host memory do not wait"
    assert cost.worth_loading(HOST * 15, arrival_s=0.5) == 15


def test_before_a_prefill_was_measured_a_late_arrival_is_compared_with_a_slow_engine() -> None:
    cost = CostModel(block_tokens=10)  # 0.01 s a block at worst
    assert cost.worth_loading(DISK * 10, arrival_s=0.09) == 10
    assert cost.worth_loading(HOST * 5 + DISK * 10, arrival_s=0.5) == 5
    assert cost.worth_loading_all(DISK * 10, 0, 10, arrival_s=0.09)
    assert not cost.worth_loading_all(DISK * 10, 0, 10, arrival_s=0.11)


def test_a_late_arrival_is_not_tried_again() -> None:
    """The manager expects it anew each time: there is nothing to learn."""
    cost = CostModel(block_tokens=10)
    cost.prefilled(1000, 1.0)  # 0.01 s a block
    assert not any(cost.worth_loading(DISK * 10, arrival_s=100.0) for _ in range(100))
    assert not any(cost.worth_loading_all(DISK * 10, 0, 10, arrival_s=100.0) for _ in range(100))
