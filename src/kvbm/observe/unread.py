"""The alarm where much is stored and nothing is ever read, with its likely causes. Pure, but for a clock.

Storing costs memory bandwidth and wears a disk. It pays only where something comes back.
"""

from __future__ import annotations

from typing import NamedTuple

from kvbm.clock import Clock
from kvbm.observe.metrics import Snapshot
from kvbm.present.numbers import format_bytes

STORED_BYTES_MIN = 1_000_000_000
UNREAD_S_MIN = 600.0
"""A cache that was begun this short a time ago may still be filling."""
UNREAD_S = 6 * 3600.0
"""After so long it is said even where host memory is not full yet."""
ALARM_EVERY_S = 3600.0
_LOADS = ("kvbm_onboard_blocks_h2d", "kvbm_onboard_blocks_d2d", "kvbm_onboard_blocks_o2d")


class Growth(NamedTuple):
    """By how much the counts that matter here have grown. `reason` is why most blocks that were found were computed,
    and host memory has evicted `evicted_blocks` because it was full."""

    stored_bytes: float
    disk_bytes: float
    remote_bytes: float
    loaded_blocks: float
    lookups: float
    asked_blocks: float
    found_blocks: float
    lost_lookups: float
    reason: str
    evicted_blocks: float

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Growth:
        """Of one life of a manager; an empty `before` is its start."""

        def grown(*key: str) -> float:
            return after.get(key, 0.0) - before.get(key, 0.0)

        def all_of(name: str) -> float:
            return sum(grown(*key) for key in after if key[0] == name)

        moved = [key for key in after if key[0] == "kvbm_transfer_bytes_total"]
        unloaded = [key for key in after if key[0] == "kvbm_unloaded_blocks_total" and grown(*key) > 0]
        return cls(
            stored_bytes=sum(grown(*key) for key in moved if key[1] == "device"),
            disk_bytes=sum(grown(*key) for key in moved if key[2] == "disk"),
            remote_bytes=sum(grown(*key) for key in moved if key[2] == "remote"),
            loaded_blocks=sum(map(grown, _LOADS)),
            lookups=all_of("kvbm_lookups_total"),
            asked_blocks=grown("kvbm_queried_blocks_total"),
            found_blocks=all_of("kvbm_hit_blocks_total"),
            lost_lookups=grown("kvbm_lost_prefixes_total"),
            reason=max(unloaded, key=lambda key: grown(*key))[1] if unloaded else "",
            evicted_blocks=grown("kvbm_evicted_blocks_total", "host", "capacity"),
        )

    def unread(self, seconds: float) -> bool:
        """Whether much was stored in so many seconds, more than host memory holds or for hours, and nothing loaded."""
        if self.stored_bytes < STORED_BYTES_MIN or self.loaded_blocks:
            return False
        return seconds >= UNREAD_S or (seconds >= UNREAD_S_MIN and self.evicted_blocks > 0)

    def alarm(self, seconds: float) -> str:
        """The line: what was stored in so many seconds, and why it is not read."""
        below = [
            f"{format_bytes(written)} written to {where}"
            for written, where in ((self.disk_bytes, "disk"), (self.remote_bytes, "the remote store"))
            if written
        ]
        further = f" ({', '.join(below)})" if below else ""
        return (
            f"{format_bytes(self.stored_bytes)} were stored in {_duration(seconds)}{further} and nothing was read: "
            f"{self._cause()}"
        )

    def _cause(self) -> str:
        if not self.asked_blocks:
            return "no request asked for a block that the device did not hold; perhaps the device's own cache is enough"
        if self.found_blocks:
            why = f", most of them for the reason {self.reason!r} of kvbm_unloaded_blocks_total"
            return f"{self.found_blocks:,.0f} blocks were found and computed all the same{why if self.reason else ''}"
        asked = f"{self.lookups:,.0f} requests asked for {self.asked_blocks:,.0f} blocks, and none was there"
        if self.lost_lookups >= 0.1 * self.lookups:
            return (
                f"{asked}; prefixes come back after they were dropped: larger tiers would help (`kvbm plan`)"
            )
        return f"{asked}. {NO_KEY_MATCHES}"


NO_KEY_MATCHES = (
    "Likely keys never match: prompts begin with what changes (a date, an id), requests have a cache_salt of their "
    "own, images or adapters change, or each start of an engine has a namespace of its own (weights that are in no "
    "local file, calculate_kv_scales); `kvbm why` says where two requests part"
)


class UnreadAlarm:
    """When the line is due: at most once an hour, for the time since something was last read."""

    def __init__(self, clock: Clock, start: Snapshot) -> None:
        self._clock = clock
        self._read_s = clock()
        self._at_read = start
        self._said_s = -ALARM_EVERY_S

    def line(self, now: Snapshot) -> str:
        """The line where it is due; else empty."""
        now_s = self._clock()
        growth = Growth.between(self._at_read, now)
        if growth.loaded_blocks:
            self._read_s, self._at_read = now_s, now
        if now_s < self._said_s + ALARM_EVERY_S or not growth.unread(now_s - self._read_s):
            return ""
        self._said_s = now_s
        return growth.alarm(now_s - self._read_s)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400.0 else f"{seconds / 60:.0f} min"
