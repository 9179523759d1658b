"""What the dashboard shows: rows of panels, each with the queries over the metrics table that it draws.

`scripts/dashboard.py` makes Grafana's file of it. Names and labels are looked up in the table, so that a panel of a
metric that was renamed is an error here and not an empty panel somewhere else.
"""

from __future__ import annotations

from typing import NamedTuple

from kvbm.observe.metric_kinds import MetricKind
from kvbm.observe.metric_table import BY_NAME

WINDOW = "$__rate_interval"
"""Grafana's: long enough for a rate at any resolution."""
CHOSEN = '{job=~"$job",instance=~"$instance"}'
"""The managers that were chosen at the top of the dashboard."""


class Query(NamedTuple):
    """One line or more of a panel: PromQL, and the name of each line, with labels in double braces."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A time series. `unit` is one of Grafana's units. `help` says what to conclude from it."""

    title: str
    unit: str
    help: str
    queries: tuple[Query, ...]


class Row(NamedTuple):
    """Panels below a title."""

    title: str
    panels: tuple[Panel, ...]


def _plain(name: str, legend: str = "", by: tuple[str, ...] = ()) -> Query:
    """A value as it is, summed over the managers."""
    return Query(f"sum{_by(name, by)}({name}{CHOSEN})", legend or _legend(by))


def _worst(name: str, by: tuple[str, ...]) -> Query:
    """The largest value among the managers."""
    return Query(f"max{_by(name, by)}({name}{CHOSEN})", _legend(by))


def _rate(name: str, legend: str = "", by: tuple[str, ...] = ()) -> Query:
    """A counter's growth a second."""
    assert BY_NAME[name].kind is MetricKind.COUNTER, name
    return Query(f"sum{_by(name, by)}(rate({name}{CHOSEN}[{WINDOW}]))", legend or _legend(by))


def _quantile(name: str, share: float, by: tuple[str, ...], what: str = "") -> Query:
    """A quantile of a histogram; `what` tells those of one panel apart."""
    assert BY_NAME[name].kind is MetricKind.HISTOGRAM, name
    buckets = f"sum by ({', '.join(('le', *by))}) (rate({name}_bucket{CHOSEN}[{WINDOW}]))"
    words = [f"p{share * 100:g}", _legend(by), what]
    return Query(f"histogram_quantile({share}, {buckets})", " ".join(filter(None, words)))


def _ratio(above: str, below: str, legend: str, by: tuple[str, ...] = ()) -> Query:
    """The growth of one counter for each unit of another's."""
    top, bottom = (
        f"sum{_by(name, by if name == above else ())}(rate({name}{CHOSEN}[{WINDOW}]))"
        for name in (above, below)
    )
    return Query(f"{top} / {f'scalar({bottom})' if by else bottom}", legend or _legend(by))


def _share(name: str, label: str, value: str, legend: str) -> Query:
    """The part of a counter's growth that one value of a label has."""
    assert value in next(row.values for row in BY_NAME[name].labels if row.name == label), value
    chosen = f'{CHOSEN[:-1]},{label}="{value}"}}'
    part, whole = (f"sum(rate({name}{labels}[{WINDOW}]))" for labels in (chosen, CHOSEN))
    return Query(f"{part} / {whole}", legend)


def _by(name: str, labels: tuple[str, ...]) -> str:
    known = [label.name for label in BY_NAME[name].labels]
    assert set(labels) <= set(known), f"{name} has labels {known}"
    return f" by ({', '.join(labels)}) " if labels else ""


def _legend(labels: tuple[str, ...]) -> str:
    return " → ".join(f"{{{{{label}}}}}" for label in labels)


def _original(title: str, name: str, unit: str = "short") -> Panel:
    """A panel of the original's dashboard: its title, and the series as it is."""
    assert BY_NAME[name].compatible
    return Panel(title, unit, BY_NAME[name].help, (Query(f"{name}{CHOSEN}", "{{instance}}"),))


ROWS: tuple[Row, ...] = (
    Row(
        "Is it worth it?",
        (
            Panel(
                "Found, of the blocks asked for",
                "percentunit",
                "Blocks that lookups found, by tier, for each block that the device did not "
                "have. Low with a full tier: "
                "a larger tier would help. Low with an empty one: prompts do not repeat.",
                (_ratio("kvbm_hit_blocks_total", "kvbm_queried_blocks_total", "", ("tier",)),),
            ),
            Panel(
                "Prefill saved",
                "short",
                "Seconds of computing that loads saved, each second.",
                (_rate("kvbm_saved_prefill_seconds_total", "saved"),),
            ),
            Panel(
                "Lost prefixes",
                "ops",
                "Lookups that found nothing of a prefix that came a short while ago: a larger tier would help.",
                (_rate("kvbm_lost_prefixes_total", "lost"),),
            ),
            Panel(
                "Tokens found, by engine",
                "short",
                "Tokens a second that an engine's lookups asked for, and found by tier.",
                (
                    _rate("kvbm_queried_tokens_total", "{{engine}} asked", ("engine",)),
                    _rate("kvbm_hit_tokens_total", by=("engine", "tier")),
                ),
            ),
            Panel(
                "Wait, by engine",
                "s",
                "From a lookup to its answer, and to the end of its load, and from a reservation of slots to its "
                "answer, as the engine saw them. It looks for answers once a step: where they come much later than "
                "that, the manager has too much to do, or too little CPU.",
                (
                    _quantile("kvbm_lookup_answer_seconds", 0.99, ("engine",), "lookup"),
                    _quantile("kvbm_load_wait_seconds", 0.99, ("engine",), "load"),
                    _quantile("kvbm_reserve_answer_seconds", 0.99, ("engine",), "reservation"),
                ),
            ),
            Panel(
                "Lookups",
                "ops",
                "Prefix lookups by outcome.",
                (_rate("kvbm_lookups_total", by=("outcome",)),),
            ),
            Panel(
                "Why nothing was found",
                "ops",
                "Lookups a second that found nothing, by what became of their first block; `kvbm why` says it of one "
                "request. evicted: a larger tier would help. never_seen: prompts that do not repeat.",
                (_rate("kvbm_missed_lookups_total", by=("reason",)),),
            ),
            Panel(
                "Lookups that found nothing",
                "percentunit",
                "Of all lookups. Near 1 with few bytes found: prompts share no beginning, or their blocks have gone. "
                "`kvbm why` says which for one request.",
                (_share("kvbm_lookups_total", "outcome", "miss", "nothing found"),),
            ),
            Panel(
                "Bytes found",
                "Bps",
                "Bytes of the blocks that lookups found, by tier.",
                (_rate("kvbm_hit_bytes_total", by=("tier",)),),
            ),
            Panel(
                "Found, but computed",
                "short",
                "Blocks a second that were found and then not loaded, by reason: cost is a choice, "
                "the others say what to mend.",
                (_rate("kvbm_unloaded_blocks_total", by=("reason",)),),
            ),
        ),
    ),
    Row(
        "Cache hit",
        (
            _original("Host Cache Hit Rate", "kvbm_host_cache_hit_rate", "percentunit"),
            _original("Disk Cache Hit Rate", "kvbm_disk_cache_hit_rate", "percentunit"),
            _original("Object Cache Hit Rate", "kvbm_object_cache_hit_rate", "percentunit"),
            _original("Matched Tokens", "kvbm_matched_tokens"),
        ),
    ),
    Row(
        "Offload",
        (
            _original("Offload Blocks - Device to Host", "kvbm_offload_blocks_d2h"),
            _original("Offload Blocks - Host to Disk", "kvbm_offload_blocks_h2d"),
            _original("Offload Blocks - Device to Disk (Bypass Host)", "kvbm_offload_blocks_d2d"),
            _original("Offload Blocks - Device to Object Storage", "kvbm_offload_blocks_d2o"),
        ),
    ),
    Row(
        "Onboard",
        (
            _original("Onboard Blocks - Host to Device", "kvbm_onboard_blocks_h2d"),
            _original("Onboard Blocks - Disk to Device", "kvbm_onboard_blocks_d2d"),
            _original("Onboard Blocks - Object Storage to Device", "kvbm_onboard_blocks_o2d"),
        ),
    ),
    Row(
        "Flows and queues",
        (
            Panel(
                "Flows between tiers",
                "Bps",
                "Bytes that arrived. Compare with what memory, link and disk can do.",
                (_rate("kvbm_transfer_bytes_total", by=("source", "target")),),
            ),
            Panel(
                "Time of a transfer",
                "s",
                "A transfer is a batch of blocks that were moved together.",
                tuple(
                    _quantile("kvbm_transfer_seconds", share, ("source", "target")) for share in (0.5, 0.99)
                ),
            ),
            Panel(
                "Size of a transfer",
                "bytes",
                "Small transfers are slow ones: more of their time is overhead.",
                (_quantile("kvbm_transfer_size_bytes", 0.5, ("source", "target")),),
            ),
            Panel(
                "Queues",
                "short",
                "Blocks on their way between host memory and disk, or a remote store. A queue that only grows: the "
                "disk or the store is too slow for what is written to it, or it hangs.",
                (_plain("kvbm_queue_blocks", by=("queue",)),),
            ),
            Panel(
                "Oldest in a queue",
                "s",
                "How long the oldest block waits: for its turn, and for the disk. Loads that wait for seconds come "
                "too late to be worth it; blocks that wait long to be written may be evicted before their turn.",
                (_worst("kvbm_queue_age_seconds", ("queue",)),),
            ),
            Panel(
                "Not offloaded",
                "short",
                "Blocks a second that were not offloaded, by reason.",
                (_rate("kvbm_skipped_offloads_total", by=("reason",)),),
            ),
        ),
    ),
    Row(
        "Tiers",
        (
            Panel(
                "Occupancy",
                "short",
                "Slots by state, and all of them.",
                (
                    _plain("kvbm_pool_blocks", by=("tier", "state")),
                    _plain("kvbm_pool_capacity_blocks", "{{tier}} capacity", ("tier",)),
                ),
            ),
            Panel(
                "Namespaces",
                "short",
                "Blocks of each namespace by tier, and how many a second were dropped: who fills the tiers, and who "
                "loses blocks.",
                (
                    _plain("kvbm_namespace_blocks", by=("namespace", "tier")),
                    _rate(
                        "kvbm_namespace_evicted_blocks_total",
                        "{{namespace}} {{tier}} dropped",
                        ("namespace", "tier"),
                    ),
                ),
            ),
            Panel(
                "Evictions",
                "short",
                "Blocks a second that were dropped, by reason. capacity: they made room for others. corrupt or "
                "missing: the medium did not give them back. tier_off: they were gone after a fault.",
                (_rate("kvbm_evicted_blocks_total", by=("tier", "reason")),),
            ),
            Panel(
                "Favoured blocks",
                "short",
                "Blocks that clients asked to be kept, those of them a second that had to go, and blocks a second that "
                "were next to be evicted and were passed over: as they are retained, or for their cache salt's share.",
                (
                    _plain("kvbm_retained_blocks", "{{tier}} retained", ("tier",)),
                    _rate("kvbm_evicted_retained_blocks_total", "{{tier}} retained and dropped", ("tier",)),
                    _rate("kvbm_spared_blocks_total", by=("tier", "favour")),
                ),
            ),
            Panel(
                "Leases",
                "short",
                "Blocks that are pinned for a request, and leases a second that ended only at their "
                "deadline: their engine died or hangs.",
                (
                    _plain("kvbm_leased_blocks", "{{tier}} leased", ("tier",)),
                    _plain("kvbm_leases", "leases"),
                    _rate("kvbm_leases_expired_total", "expired leases"),
                ),
            ),
            Panel(
                "Bytes written to disk for each byte found there",
                "short",
                "Since the start. High: the disk wears for little; a stricter admission policy helps.",
                (Query(f"kvbm_disk_write_bytes_per_hit_byte{CHOSEN}", "{{instance}}"),),
            ),
        ),
    ),
    Row(
        "Remote stores",
        (
            Panel(
                "Requests",
                "ops",
                "Requests a second by kind, as stores bill them, those that failed, and reads that were asked a second "
                "time because the first answer took unusually long.",
                (
                    _rate("kvbm_remote_requests_total", by=("kind",)),
                    _rate("kvbm_remote_errors_total", "{{operation}} failed", ("operation",)),
                    _rate("kvbm_remote_hedged_reads_total", "asked twice"),
                ),
            ),
            Panel(
                "Latency of a read",
                "s",
                "As it is expected now, of the slowest manager. Loads are only begun where computing would take "
                "longer.",
                (_worst("kvbm_remote_latency_seconds", ()),),
            ),
            Panel(
                "Known in remote stores",
                "short",
                "Blocks, and the packs that they lie in, of which managers know where they lie; each manager counts "
                "what it knows, so what several know is counted several times.",
                (
                    _plain("kvbm_remote_known_blocks", "blocks"),
                    _plain("kvbm_remote_known_packs", "packs"),
                ),
            ),
            Panel(
                "Breakers",
                "short",
                "One of each namespace for reads, and one for writes. open: the store is not asked for a while.",
                (_plain("kvbm_remote_breakers", by=("operation", "state")),),
            ),
            Panel(
                "Not written to a store",
                "short",
                "Blocks a second by reason. evicted: host memory had no room until their turn came. budget: the bound "
                "on bytes or requests an hour. tier_off: the store was off.",
                (_rate("kvbm_remote_skipped_blocks_total", by=("reason",)),),
            ),
            Panel(
                "Codec",
                "short",
                "Managers that write so: compressed where that pays, or as it is.",
                (_plain("kvbm_remote_codec", by=("codec",)),),
            ),
        ),
    ),
    Row(
        "What clients say",
        (
            Panel(
                "Hints",
                "ops",
                "Parts of hints by what became of them. Many that are rejected: a client's form, or a bound.",
                (_rate("kvbm_hints_total", by=("part", "outcome", "reason")),),
            ),
            Panel(
                "Brought up before it was asked for",
                "short",
                "Blocks a second from disk to host memory, by cause; and those that were not brought up for want of "
                "room.",
                (
                    _rate("kvbm_prefetched_blocks_total", by=("cause",)),
                    _rate("kvbm_prefetch_refused_blocks_total", "{{cause}} refused", ("cause",)),
                ),
            ),
            Panel(
                "Was it of use?",
                "short",
                "What became of those blocks. Many that are evicted or unasked: clients expect what does not come.",
                (_rate("kvbm_prefetched_blocks_ended_total", by=("cause", "fate")),),
            ),
        ),
    ),
    Row(
        "Health",
        (
            Panel(
                "Failures",
                "short",
                "Blocks a second that could not be read, written or loaded. corrupt: a checksum "
                "did not match, and the block "
                "was computed instead.",
                (
                    _rate("kvbm_failures_total", by=("tier", "kind")),
                    _rate("kvbm_recompute_fallbacks_total", "{{engine}} loads computed instead", ("engine",)),
                ),
            ),
            Panel(
                "Tried again",
                "ops",
                "Lookups whose first answer no longer held, stores of blocks for which there had been no room, and "
                "starts of a tier that is off.",
                (_rate("kvbm_retries_total", by=("operation",)),),
            ),
            Panel(
                "Object storage failures",
                "short",
                "The original's counters.",
                (_plain("kvbm_object_read_failures", "read"), _plain("kvbm_object_write_failures", "write")),
            ),
            Panel(
                "Tiers that work", "short", "0: off after a fault.", (_plain("kvbm_tier_up", by=("tier",)),)
            ),
            Panel(
                "Engines and sessions",
                "short",
                "What is connected.",
                (_plain("kvbm_engines", "engines"), _plain("kvbm_sessions", by=("role",))),
            ),
        ),
    ),
)
"""The dashboard, from the top down. The rows Cache hit, Offload and Onboard are the original's."""
