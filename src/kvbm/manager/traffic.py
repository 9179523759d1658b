"""The manager's counts: transfers that ended, hit rates, and the lines that an operator reads."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from kvbm.block import Tier
from kvbm.clock import Clock
from kvbm.layout import BlockLayout
from kvbm.observe.hit_rates import HitCounts, HitRateLog, HitRateWindow
from kvbm.observe.line_budget import LineBudget
from kvbm.observe.log import traffic_line
from kvbm.observe.metrics import Metrics
from kvbm.observe.unread import UnreadAlarm
from kvbm.protocol import UNLOADED_REASONS
from kvbm.settings import Settings

log = logging.getLogger("kvbm.traffic")

SUMMARY_INTERVAL_S = 60.0
ENGINE_LINES_MAX = 8
"""Engines that have a line of hit rates in one interval of these."""
_ENGINES_MAX = 64
CACHES = (Tier.HOST, Tier.DISK, Tier.REMOTE)
PREFILL_S_MAX = 86400.0
"""No load saved more: a client that says so is not believed."""


class _EngineHits:
    """The hit rates of one engine, and when they are logged."""

    def __init__(self, engine: str, settings: Settings, clock: Clock) -> None:
        self.window = HitRateWindow(settings.stats_window_requests)
        self.log = HitRateLog(engine, settings.stats_log_interval_s, clock)


class Traffic:
    """Counts transfers **after** the bytes have moved, and hit rates when a lookup is answered, as the original does.

    Owned by the manager's thread.
    """

    def __init__(self, metrics: Metrics, settings: Settings, clock: Clock) -> None:
        self.metrics = metrics
        self._settings = settings
        self._clock = clock
        self._window = HitRateWindow(settings.stats_window_requests)
        self._engines: dict[str, _EngineHits] = {}
        self._hit_lines = LineBudget(ENGINE_LINES_MAX, max(settings.stats_log_interval_s, 1), clock)
        self._summary_at_s = clock() + SUMMARY_INTERVAL_S
        self._before = metrics.snapshot()
        self._unread = UnreadAlarm(clock, self._before)

    def looked_up(self, engine: str, queried_blocks: int, sources: bytes) -> None:
        """A lookup was answered; `sources` has one tier per block found."""
        counts = HitCounts(
            queried_blocks=max(queried_blocks, len(sources)),
            host_blocks=sources.count(Tier.HOST),
            disk_blocks=sources.count(Tier.DISK),
            remote_blocks=sources.count(Tier.REMOTE),
        )
        self._window.record(counts)
        if engine not in self._engines and len(self._engines) < _ENGINES_MAX:
            self._engines[engine] = _EngineHits(engine, self._settings, self._clock)
        if engine in self._engines:
            self._engines[engine].window.record(counts)

    def asked(self, label: str, layout: BlockLayout, queried_blocks: int, sources: bytes) -> None:
        """Count the same in tokens, for the engine of this name in metrics."""
        tokens = layout.block_tokens
        self.metrics.add("kvbm_queried_tokens_total", max(0, queried_blocks) * tokens, engine=label)
        for tier in CACHES:
            found, name = sources.count(tier), tier.name.lower()
            self.metrics.add("kvbm_hit_tokens_total", found * tokens, engine=label, tier=name)
        self.metrics.add("kvbm_recompute_fallbacks_total", 0, engine=label)

    def missed(self, reason: str) -> None:
        """A lookup found nothing for this reason; empty where it found something."""
        if reason:
            self.metrics.add("kvbm_missed_lookups_total", reason=reason)

    def waited(self, label: str, answer_s: float, wait_s: float) -> None:
        """How long an engine says it waited for an answer, and for the load; what is not a time is left out."""
        self._observe("kvbm_lookup_answer_seconds", label, answer_s)
        self._observe("kvbm_load_wait_seconds", label, wait_s)

    def reserved(self, label: str, answer_s: float) -> None:
        """How long an engine says it waited for the answer to a reservation; what is not a time is left out."""
        self._observe("kvbm_reserve_answer_seconds", label, answer_s)

    def tried_again(self, operation: str) -> None:
        """An engine says that it asks once more: for a `lookup`, or to `store` blocks."""
        self.metrics.add("kvbm_retries_total", operation=operation)

    def loaded(self, layout: BlockLayout, sources: bytes, seconds: float, prefill_s: float = 0.0) -> None:
        """Blocks reached the device on all ranks; `sources` says which tier each was found in. Computing them would
        have taken `prefill_s`."""
        if 0.0 < prefill_s < PREFILL_S_MAX:
            self.metrics.add("kvbm_saved_prefill_seconds_total", prefill_s)
        self.metrics.add("kvbm_onboard_blocks_h2d", sources.count(Tier.HOST))
        self.metrics.add("kvbm_onboard_blocks_d2d", sources.count(Tier.DISK))
        self.metrics.add("kvbm_onboard_blocks_o2d", sources.count(Tier.REMOTE))
        size = len(sources) * layout.shard_bytes * layout.shard_count
        self.metrics.add("kvbm_transfer_bytes_total", size, source="host", target="device")
        self.metrics.observe("kvbm_transfer_seconds", seconds, source="host", target="device")
        self.metrics.observe("kvbm_transfer_size_bytes", size, source="host", target="device")

    def stored(self, layout: BlockLayout, blocks: int, seconds: float) -> None:
        """Blocks were copied to host memory by all ranks."""
        if blocks:
            size = blocks * layout.shard_bytes * layout.shard_count
            self.metrics.observe("kvbm_transfer_size_bytes", size, source="device", target="host")
            self.metrics.observe("kvbm_transfer_seconds", seconds, source="device", target="host")

    def matched(self, layout: BlockLayout, blocks: int) -> None:
        """The load of so many blocks was begun, whether or not they arrived."""
        self.metrics.add("kvbm_matched_tokens", blocks * layout.block_tokens)

    def unloaded(self, blocks: Mapping[str, int]) -> None:
        """Blocks that were found and yet computed, by reason; unknown reasons are left out."""
        for reason, count in blocks.items():
            if reason in UNLOADED_REASONS and count > 0:
                self.metrics.add("kvbm_unloaded_blocks_total", count, reason=reason)

    def failed_load(self, label: str, found: bytes) -> None:
        """Blocks that were promised, by where they were found, did not reach the device; the engine computes them."""
        self.metrics.add("kvbm_recompute_fallbacks_total", engine=label)
        for tier in CACHES:
            self.metrics.add("kvbm_failures_total", found.count(tier), tier=tier.name.lower(), kind="load")

    def publish(self, roles: Sequence[str], engine_count: int) -> None:
        """Bring the gauges of sessions and hit rates up to date."""
        for role, number in {"leader": 0, "worker": 0, "admin": 0, **Counter(roles)}.items():
            self.metrics.set("kvbm_sessions", number, role=role)
        self.metrics.set("kvbm_engines", engine_count)
        totals = self._window.totals()
        self.metrics.set("kvbm_host_cache_hit_rate", totals.host_rate)
        self.metrics.set("kvbm_disk_cache_hit_rate", totals.disk_rate)
        self.metrics.set("kvbm_object_cache_hit_rate", totals.remote_rate)

    def tick(self, engines: Collection[str]) -> None:
        """Log the lines that are due; `engines` are the present ones. Those of many engines wait for their turns."""
        for name, hits in list(self._engines.items()):
            if not self._hit_lines.has_room():
                break
            if (line := hits.log.line(hits.window.totals())) and self._hit_lines.admits():
                log.info(line)
                self._engines[name] = self._engines.pop(name)  # its next turn comes after all others'
        # After its last line; an engine that comes back under its name starts a log of its own.
        self._engines = {name: hits for name, hits in self._engines.items() if name in engines}
        if self._clock() >= self._summary_at_s:
            self.summarize()

    def _observe(self, name: str, label: str, seconds: float) -> None:
        if 0.0 < seconds < math.inf:
            self.metrics.observe(name, seconds, engine=label)

    def summarize(self) -> None:
        """Log the transfers since the last summary, if there were any."""
        now_s = self._clock()
        after = self.metrics.snapshot()
        if line := traffic_line(self._before, after, SUMMARY_INTERVAL_S + now_s - self._summary_at_s):
            log.info(line)
        if line := self._unread.line(after):
            log.warning(line)
        self._before, self._summary_at_s = after, now_s + SUMMARY_INTERVAL_S
