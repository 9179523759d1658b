"""The rounds in which all packs of a store are listed: every pack is in one, and none costs more than its bound."""

from __future__ import annotations

import pytest

from kvbm.tiers.remote.packs import PACK_PREFIX
from kvbm.tiers.remote.sweep import LISTINGS_A_ROUND, PAGE_NAMES, Sweep

PERIOD_S = 600.0


def pages(names: int) -> int:
    return -(-names // PAGE_NAMES)


@pytest.mark.parametrize(
    ("packs", "rounds"),
    [(0, 1), (16_000, 1), (16_001, 16), (256_000, 16), (1_000_000, 64), (10_000_000, 256)],
)
def test_every_directory_has_its_turn(packs: int, rounds: int) -> None:
    sweep, now_s, listed = Sweep(PERIOD_S), 0.0, list[str]()
    sweep.listed_all(packs, 0.0, 0.0)
    each = -(-packs // 256)
    for _ in range(rounds):
        now_s += PERIOD_S
        assert sweep.due(now_s) and not sweep.due(now_s - 1.0)
        parts = sweep.begin(now_s, now_s)
        whole = parts[0].prefix == PACK_PREFIX
        costs = pages(packs) if whole else len(parts) * pages(each)
        assert costs <= LISTINGS_A_ROUND or len(parts) == 1
        listed += [f"{n:02x}" for n in range(256)] if whole else [part.prefix[-3:-1] for part in parts]
        sweep.end(parts, packs if whole else len(parts) * each)
    assert sorted(listed) == [f"{n:02x}" for n in range(256)]


def test_no_moment_is_between_two_rounds() -> None:
    sweep, until = Sweep(PERIOD_S), dict[str, float]()
    sweep.listed_all(100_000, 0.0, 5000.0)
    for number in range(1, 100):
        parts = sweep.begin(number * PERIOD_S, 5000.0 + number * PERIOD_S)
        for part in parts:
            assert part.since_s < until.get(part.prefix, 5000.0)
            until[part.prefix] = part.until_s
        sweep.end(parts, len(parts) * 391)
    assert min(until.values()) > 5000.0 + (100 - 18) * PERIOD_S


def test_a_round_that_failed_is_tried_again() -> None:
    sweep = Sweep(PERIOD_S)
    sweep.listed_all(100_000, 0.0, 0.0)
    failed = sweep.begin(600.0, 600.0)
    again = sweep.begin(1200.0, 1200.0)
    assert [(part.prefix, part.since_s) for part in again] == [(part.prefix, part.since_s) for part in failed]


@pytest.mark.parametrize("packs", [100, 100_000])
def test_a_part_that_had_too_much_begins_there_again(packs: int) -> None:
    sweep, since = Sweep(PERIOD_S), dict[str, list[float]]()
    sweep.listed_all(packs, 0.0, 0.0)
    cut = sweep.begin(600.0, 600.0)[0]
    for number in range(1, 40):
        parts = sweep.begin(number * PERIOD_S, number * PERIOD_S)
        for part in parts:
            since.setdefault(part.prefix, []).append(part.since_s)
        sweep.end(parts, packs * len(parts) // 256, [part for part in parts if part.prefix == cut.prefix])
    assert len(since[cut.prefix]) > 1 and set(since.pop(cut.prefix)) == {cut.since_s}
    assert all(each == sorted(set(each)) for each in since.values()), "the others go on"


def test_none_is_due_before_all_packs_were_listed() -> None:
    assert not Sweep(PERIOD_S).due(1e9)
