"""Hit rates over the last requests, for the gauges and for a log line that users of the original search for."""

from __future__ import annotations

from collections import deque

import msgspec

from kvbm.clock import Clock


class HitCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks requests asked for, and how many of them each tier held."""

    queried_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    remote_blocks: int = 0

    @property
    def host_rate(self) -> float:
        """Share of the queried blocks found in the host tier, 0.0 to 1.0."""
        return self._share(self.host_blocks)

    @property
    def disk_rate(self) -> float:
        """Share of the queried blocks found on disk, 0.0 to 1.0."""
        return self._share(self.disk_blocks)

    @property
    def remote_rate(self) -> float:
        """Share of the queried blocks found in a remote tier, 0.0 to 1.0."""
        return self._share(self.remote_blocks)

    def _share(self, blocks: int) -> float:
        return blocks / self.queried_blocks if self.queried_blocks else 0.0


class HitRateWindow:
    """The hit counts of the last `requests_max` requests, kept as running sums."""

    def __init__(self, requests_max: int) -> None:
        assert requests_max > 0
        self._requests: deque[HitCounts] = deque()
        self._requests_max = requests_max
        self._queried = self._host = self._disk = self._remote = 0

    def record(self, counts: HitCounts) -> None:
        """Add one finished request. A request that asked for no block is left out."""
        if counts.queried_blocks == 0:
            return
        found = counts.host_blocks + counts.disk_blocks + counts.remote_blocks
        assert 0 <= found <= counts.queried_blocks
        self._requests.append(counts)
        self._add(counts, 1)
        if len(self._requests) > self._requests_max:
            self._add(self._requests.popleft(), -1)

    def _add(self, counts: HitCounts, sign: int) -> None:
        self._queried += sign * counts.queried_blocks
        self._host += sign * counts.host_blocks
        self._disk += sign * counts.disk_blocks
        self._remote += sign * counts.remote_blocks

    def totals(self) -> HitCounts:
        """The sums over the window."""
        return HitCounts(
            queried_blocks=self._queried,
            host_blocks=self._host,
            disk_blocks=self._disk,
            remote_blocks=self._remote,
        )


class HitRateLog:
    """Decides when the hit rates are logged: after a request, if they changed, and not too often."""

    def __init__(self, engine_id: str, interval_s: float, clock: Clock) -> None:
        self._engine_id = engine_id
        self._interval_s = interval_s
        self._clock = clock
        self._logged_at_s: float | None = None
        self._logged = HitCounts()

    def line(self, totals: HitCounts) -> str:
        """The line to log now, or an empty string."""
        # At the start `_logged` holds no request, so nothing is logged before the first one.
        if totals == self._logged:
            return ""
        now_s = self._clock()
        if self._logged_at_s is not None and now_s - self._logged_at_s < self._interval_s:
            return ""
        self._logged_at_s, self._logged = now_s, totals
        return hit_rate_line(self._engine_id, totals)


def hit_rate_line(engine_id: str, totals: HitCounts) -> str:
    """The same line as the original writes; behind it what was found in a remote tier, where anything was."""
    remote = (
        f", Remote: {totals.remote_rate:.1%} ({totals.remote_blocks}/{totals.queried_blocks})"
        if totals.remote_blocks
        else ""
    )
    return (
        f"KVBM [worker-{engine_id}] Cache Hit Rates -"
        f" Host: {totals.host_rate:.1%} ({totals.host_blocks}/{totals.queried_blocks}),"
        f" Disk: {totals.disk_rate:.1%} ({totals.disk_blocks}/{totals.queried_blocks})"
        f"{remote}"
    )
