"""Targets, prices and sizes of `kvbm plan`, and its search against looking everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbm.errors import SettingsError
from kvbm.settings.parse import GB
from kvbm.sim.plan import cheapest
from kvbm.sim.plan.cheapest import Bounds, Point, Prices, Search, Target, sizes_between, smallest_enough
from rigs.property_tests import scale_examples
from rigs.sizes import everywhere

# ---- targets, prices, sizes


def test_targets_as_users_write_them() -> None:
    assert (
        cheapest.parse_hit_rate("x", "30%")
        == cheapest.parse_hit_rate("x", " 0.3 ")
        == Target(least_hit_rate=0.3)
    )
    assert (
        cheapest.parse_seconds("x", "2.5s")
        == cheapest.parse_seconds("x", "2500ms")
        == cheapest.parse_seconds("x", "2.5@p90")
    )
    assert cheapest.parse_seconds("x", "250ms@mean") == Target(most_s=0.25, statistic="mean")


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "1.01", "-1", "x", "30 percent"])
def test_hit_rates_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--t=.* cannot be used: a share above 0 and at most 1"):
        cheapest.parse_hit_rate("--t", text)


@pytest.mark.parametrize("text", ["", "0s", "1h", "-1s", "1s@", "1s@p95", "@p90", "s"])
def test_seconds_that_are_none(text: str) -> None:
    with pytest.raises(
        SettingsError, match=r"--t=.* cannot be used: seconds above 0, and behind an @ one of mean"
    ):
        cheapest.parse_seconds("--t", text)


def test_costs() -> None:
    assert Prices(host_per_gb=2.0, disk_per_gb=0.5).cost((3 * GB, 10 * GB)) == 11.0
    shares = cheapest.shares_of(Bounds(host_bytes=20 * GB, disk_bytes=100 * GB))
    assert shares.cost((20 * GB, 100 * GB)) == pytest.approx(200.0)
    assert shares.cost((5 * GB, 0)) == pytest.approx(25.0)


def test_bounds() -> None:
    bounds = Bounds(host_bytes=5).within(Bounds(host_bytes=7, disk_bytes=3))
    assert bounds == Bounds(host_bytes=5, disk_bytes=3)
    assert bounds.allow((5, 3)) and not bounds.allow((6, 0)) and not bounds.allow((0, 4))
    assert Bounds().allow((10**18, 10**18))


def test_this_machine_has_memory_and_disk(tmp_path: Path) -> None:
    found = cheapest.this_machine(tmp_path)
    assert (found.disk_bytes or 0) > 0
    with pytest.raises(FileNotFoundError):
        cheapest.this_machine(tmp_path / "nowhere")


def test_sizes_are_round_numbers() -> None:
    assert sizes_between(9, 60, None, 1) == [10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68]
    assert sizes_between(40, 100, 70, 1) == [47, 56, 68, 70]
    assert sizes_between(40, 100, 68, 1) == [47, 56, 68]
    assert sizes_between(40, 50, 10_000, 1) == [47, 56]
    # What holds as many blocks as the one before, or none, is not worth a look.
    assert sizes_between(1, 60, None, 20) == [22, 47, 68]
    assert sizes_between(1, 60, 15, 20) == []
    assert cheapest.coarse([10, 12, 15, 18, 22, 27]) == [12, 27]


def test_the_frontier_is_what_nothing_beats() -> None:
    assert cheapest.frontier([(3.0, 1.0), (1.0, 5.0), (2.0, 5.0), (4.0, 1.0), (2.0, 3.0)]) == [1, 4, 0]
    assert cheapest.frontier([]) == []


# ---- the search against looking everywhere


@settings(max_examples=scale_examples(300), deadline=None)
@example([(55, 58)], 3.0, 0.1, None, 60)
@given(
    st.lists(st.tuples(st.integers(0, 130), st.integers(0, 900)), min_size=1, max_size=4),
    st.floats(0.0, 10.0),
    st.floats(0.0, 10.0),
    st.one_of(st.none(), st.integers(1, 150)),
    st.one_of(st.none(), st.integers(0, 1000)),
)
def test_the_search_finds_the_cheapest_of_all(
    corners: list[Point], host_price: float, disk_price: float, most_host: int | None, most_disk: int | None
) -> None:
    bounds = Bounds(host_bytes=most_host, disk_bytes=most_disk)
    hosts = sizes_between(5, 100, most_host, 1)
    disks = sizes_between(10, 700, most_disk, 1) if most_disk != 0 else []
    prices = Prices(host_per_gb=host_price * GB, disk_per_gb=disk_price * GB)
    asked: list[Point] = []

    def meets(point: Point) -> bool:
        asked.append(point)
        return any(point[0] >= host and point[1] >= disk for host, disk in corners)

    search = Search(meets, prices.cost, 1000, bounds)
    search.run(hosts, disks)
    looked = len(asked)
    enough = [point for point in everywhere(hosts, disks, bounds) if meets(point)]
    best = min(enough, key=lambda point: (prices.cost(point), point), default=None)
    assert search.best == best
    assert len(set(asked[:looked])) == looked
    assert looked <= 80


def test_the_search_ends_when_told_to() -> None:
    hosts, disks = sizes_between(5, 100, None, 1), sizes_between(10, 700, None, 1)
    for looks in (1, 7, 30):
        search = Search(lambda point: point[0] >= 40, Prices().cost, looks, Bounds())
        search.run(hosts, disks)
        assert len(search.seen) == looks
        assert search.cut_short


@given(st.integers(0, 500), st.integers(0, 500))
def test_bisection_finds_the_smallest(low: int, further: int) -> None:
    high = low + 1 + further
    for smallest in {low + 1, (low + 1 + high) // 2, high}:
        assert smallest_enough(lambda size, least=smallest: size >= least, low, high, 0.0) == smallest  # type: ignore[misc]
        rough = smallest_enough(lambda size, least=smallest: size >= least, low, high, 0.1)  # type: ignore[misc]
        assert smallest <= rough <= max(smallest + 1, 1.1 * smallest)
