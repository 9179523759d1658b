"""Targets, prices and bounds of sizes, and the search for the cheapest sizes that meet a target."""

from __future__ import annotations

import re
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvbm.errors import SettingsError
from kvbm.settings.advice import available_memory_bytes
from kvbm.settings.parse import GB

ASSUMED_HOST_PRICE = 3.0
ASSUMED_DISK_PRICE = 0.1
"""Dollars for a GB in a month: round numbers to begin with, nobody's offer."""

DOLLARS = "$/month"
PERCENT = "% of machine"

ROUND_NUMBERS = (10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68, 82)
"""Times powers of ten: each about 1.21 times the one before."""
COARSE = 4
"""Every so many of them are tried first."""

Point = tuple[int, int]
"""Bytes of host memory and of disk; 0 is none."""


STATISTICS = ("mean", "p50", "p90", "p99")
DEFAULT_STATISTIC = "p90"

_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s)?(?:\s*@\s*([a-z0-9]+))?")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that were tried, their cost and their results. Sizes in bytes, times in seconds.

    `staged`: there is no host tier, and the host memory is the staging area that a disk tier alone has. With a target
    of hit rates neither times nor the tier of a hit are known: those fields are 0.
    """

    host_bytes: int
    disk_bytes: int
    cost: float
    hit_rate: float
    staged: bool = False
    disk_hit_rate: float = 0.0
    ttft_mean_s: float = 0.0
    ttft_p50_s: float = 0.0
    ttft_p90_s: float = 0.0
    ttft_p99_s: float = 0.0
    load: float = 0.0
    disk_written_bytes_per_day: float = 0.0
    meets: bool = False

    @property
    def point(self) -> Point:
        """Both sizes."""
        return self.host_bytes, self.disk_bytes


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rates of at least `least_hit_rate`, or times to first token whose `statistic` is at most `most_s` seconds."""

    least_hit_rate: float | None = None
    most_s: float | None = None
    statistic: str = DEFAULT_STATISTIC

    def measure(self, candidate: Candidate) -> float:
        """The number that the target is about: seconds, or a share."""
        if self.most_s is None:
            return candidate.hit_rate
        seconds: float = getattr(candidate, f"ttft_{self.statistic}_s")
        return seconds

    def met_by(self, candidate: Candidate) -> bool:
        """Whether these sizes meet the target."""
        if self.most_s is not None:
            return self.measure(candidate) <= self.most_s
        assert self.least_hit_rate is not None
        return candidate.hit_rate >= self.least_hit_rate


def parse_hit_rate(field: str, text: str) -> Target:
    """`0.3` or `30%`: the share of the blocks asked for that must hit."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) / (100.0 if match[2] else 1.0) if match else 0.0
    if not 0.0 < rate <= 1.0:
        raise SettingsError(field, text, "a share above 0 and at most 1, such as 0.3 or 30%")
    return Target(least_hit_rate=rate)


def parse_seconds(field: str, text: str) -> Target:
    """`2.5s`, `250ms` or `2.5`, and behind an @ which statistic of the requests' times; p90 without."""
    match = _SECONDS.fullmatch(text.strip())
    statistic = (match[3] if match else None) or DEFAULT_STATISTIC
    seconds = float(match[1]) / (1000.0 if match[2] == "ms" else 1.0) if match else 0.0
    if not seconds > 0.0 or statistic not in STATISTICS:
        accepted = f"seconds above 0, and behind an @ one of {', '.join(STATISTICS)}: 2.5s or 250ms@p50"
        raise SettingsError(field, text, accepted)
    return Target(most_s=seconds, statistic=statistic)


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """The price of 10^9 bytes of each tier, in `unit`. `assumed`: the user gave none, so these are the ones above."""

    host_per_gb: float = ASSUMED_HOST_PRICE
    disk_per_gb: float = ASSUMED_DISK_PRICE
    unit: str = DOLLARS
    assumed: bool = False

    def cost(self, point: Point) -> float:
        """The cost of both sizes together, in `unit`."""
        return (point[0] * self.host_per_gb + point[1] * self.disk_per_gb) / GB


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The largest sizes that may be proposed, in bytes; None is no bound, 0 goes without the tier."""

    host_bytes: int | None = None
    disk_bytes: int | None = None

    def allow(self, point: Point) -> bool:
        """Whether both sizes are within the bounds."""
        most = (self.host_bytes, self.disk_bytes)
        return all(bound is None or size <= bound for size, bound in zip(point, most, strict=True))

    def within(self, other: Bounds) -> Bounds:
        """The smaller bound of each tier."""

        def least(*bounds: int | None) -> int | None:
            return min((bound for bound in bounds if bound is not None), default=None)

        return Bounds(
            host_bytes=least(self.host_bytes, other.host_bytes),
            disk_bytes=least(self.disk_bytes, other.disk_bytes),
        )


def this_machine(directory: Path) -> Bounds:
    """The memory that is available here now, and the free bytes on the disk of `directory`. `OSError` if it is none."""
    free_bytes = shutil.disk_usage(directory).free
    return Bounds(host_bytes=available_memory_bytes(), disk_bytes=free_bytes)


def shares_of(machine: Bounds) -> Prices:
    """In place of prices: all of a machine's memory costs 100, and so does all of its free disk."""
    per_gb = [100.0 * GB / size if size else 0.0 for size in (machine.host_bytes, machine.disk_bytes)]
    return Prices(host_per_gb=per_gb[0], disk_per_gb=per_gb[1], unit=PERCENT)


def sizes_between(smallest: int, enough: int, bound: int | None, block_bytes: int) -> list[int]:
    """Sizes to try, in bytes, ascending: round numbers from `smallest` to the first that is `enough`.

    A bound below that ends them, as the last of them. Sizes that hold no block, or no more than the one before, are
    left out.
    """
    sizes: list[int] = []
    scale = 0
    while not sizes or sizes[-1] < enough:
        rounds = (number * 10**scale // 10 for number in ROUND_NUMBERS)
        sizes += [size for size in rounds if size >= smallest]
        scale += 1
    sizes = sizes[: bisect_left(sizes, enough) + 1]
    if bound is not None and bound < sizes[-1]:
        sizes = [*sizes[: bisect_left(sizes, bound)], bound]
    by_blocks: dict[int, int] = {}
    for size in sizes:
        by_blocks.setdefault(size // block_bytes, size)
    return [size for blocks, size in by_blocks.items() if blocks]


def coarse(sizes: Sequence[int]) -> list[int]:
    """Some of the sizes, evenly spread; the last is one of them."""
    return list(sizes[::-1][::COARSE][::-1])


class Search:
    """Looks for the cheapest point that meets the target, with few looks.

    `meets` is called once for each point, and at most `looks` times. The search assumes that more is never worse: where
    larger sizes did not meet the target, smaller ones are not tried. Policies are not quite that regular, so something
    cheaper may be missed; `best` was always seen to meet the target.
    """

    def __init__(
        self, meets: Callable[[Point], bool], cost: Callable[[Point], float], looks: int, bounds: Bounds
    ) -> None:
        self._meets = meets
        self._cost = cost
        self._looks = looks
        self._bounds = bounds
        self.seen: dict[Point, bool] = {}
        self.best: Point | None = None
        self.cut_short = False

    def run(self, hosts: Sequence[int], disks: Sequence[int]) -> None:
        """A coarse grid first, for the picture too; then every disk size, the nearest to the best first."""
        self._look((0, 0))
        for disk in (0, *coarse(disks)):
            # The largest host memory that this disk is larger than is one of them: with the largest disk, or without
            # any, what does not meet there meets nowhere.
            for host in coarse([host for host in hosts if self._worth((host, disk))]):
                self._look((host, disk))
        if self.best is None or not hosts:
            return
        all_disks = [0, *disks]
        start = all_disks.index(self.best[1])
        for disk in sorted(all_disks, key=lambda disk: abs(all_disks.index(disk) - start)):
            self._smallest_host(hosts, disk)

    def _smallest_host(self, hosts: Sequence[int], disk: int) -> None:
        """Among host sizes that with this disk cost less than the best: the smallest that meets."""
        assert self.best is not None
        least = self._rank(self.best)
        below = [host for host in hosts if self._worth((host, disk)) and self._rank((host, disk)) < least]
        # The most expensive size first: if it is not enough, none is.
        low, high = -1, len(below)
        middle = high - 1
        while low < middle < high:
            if self._enough((below[middle], disk)):
                high = middle
            else:
                low = middle
            middle = (low + high) // 2

    def _enough(self, point: Point) -> bool:
        if point not in self.seen:
            failed = (other for other, met in self.seen.items() if not met)
            if any(other[0] >= point[0] and other[1] >= point[1] for other in failed):
                return False
        return self._look(point)

    def _look(self, point: Point) -> bool:
        if point in self.seen or not self._worth(point):
            return self.seen.get(point, False)
        if len(self.seen) >= self._looks:
            self.cut_short = True
            return False
        met = self.seen[point] = self._meets(point)
        if met and (self.best is None or self._rank(point) < self._rank(self.best)):
            self.best = point
        return met

    def _rank(self, point: Point) -> tuple[float, Point]:
        return self._cost(point), point

    def _worth(self, point: Point) -> bool:
        """A disk that is no larger than host memory would hold little else."""
        host, disk = point
        return self._bounds.allow(point) and (not disk or disk > host)


def smallest_enough(meets: Callable[[int], bool], low: int, high: int, precision: float) -> int:
    """The smallest whole number that meets, between `low` that does not and `high` that does.

    Exact, or for large numbers off by no more than `precision` of itself; the answer was seen to meet.
    """
    while high - low > max(1.0, precision * low):
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices, by cost, of the points (cost, badness) that no other point beats in both."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    kept: list[int] = []
    for i in order:
        if not kept or points[i][1] < points[kept[-1]][1]:
            kept.append(i)
    return kept
