"""What the dashboard shows: rows of panels, each with the queries over the metrics table that it draws.

`scripts/dashboard.py` makes Grafana's file of it.
"""

from __future__ import annotations

from panel_queries import CHOSEN, Panel, Query, Row, original, plain, quantile, rate, ratio, share, worst

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
                (ratio("kvbm_hit_blocks_total", "kvbm_queried_blocks_total", "", ("tier",)),),
            ),
            Panel(
                "Prefill saved",
                "short",
                "Seconds of computing that loads saved, each second.",
                (rate("kvbm_saved_prefill_seconds_total", "saved"),),
            ),
            Panel(
                "Lost prefixes",
                "ops",
                "Lookups that found nothing of a prefix that came a short while ago: a larger tier would help.",
                (rate("kvbm_lost_prefixes_total", "lost"),),
            ),
            Panel(
                "Tokens found, by engine",
                "short",
                "Tokens a second that an engine's lookups asked for, and found by tier.",
                (
                    rate("kvbm_queried_tokens_total", "{{engine}} asked", ("engine",)),
                    rate("kvbm_hit_tokens_total", by=("engine", "tier")),
                ),
            ),
            Panel(
                "Wait, by engine",
                "s",
                "From a lookup to its answer, and to the end of its load, and from a reservation of slots to its "
                "answer, as the engine saw them. It looks for answers once a step: where they come much later than "
                "that, the manager has too much to do, or too little CPU.",
                (
                    quantile("kvbm_lookup_answer_seconds", 0.99, ("engine",), "lookup"),
                    quantile("kvbm_load_wait_seconds", 0.99, ("engine",), "load"),
                    quantile("kvbm_reserve_answer_seconds", 0.99, ("engine",), "reservation"),
                ),
            ),
            Panel(
                "Lookups",
                "ops",
                "Prefix lookups by outcome.",
                (rate("kvbm_lookups_total", by=("outcome",)),),
            ),
            Panel(
                "Why nothing was found",
                "ops",
                "Lookups a second that found nothing, by what became of their first block; `kvbm why` says it of one "
                "request. evicted: a larger tier would help. never_seen: prompts that do not repeat.",
                (rate("kvbm_missed_lookups_total", by=("reason",)),),
            ),
            Panel(
                "Lookups that found nothing",
                "percentunit",
                "Of all lookups. Near 1 with few bytes found: prompts share no beginning, or their blocks have gone. "
                "`kvbm why` says which for one request.",
                (share("kvbm_lookups_total", "outcome", "miss", "nothing found"),),
            ),
            Panel(
                "Bytes found",
                "Bps",
                "Bytes of the blocks that lookups found, by tier.",
                (rate("kvbm_hit_bytes_total", by=("tier",)),),
            ),
            Panel(
                "Found, but computed",
                "short",
                "Blocks a second that were found and then not loaded, by reason: cost is a choice, "
                "the others say what to mend.",
                (rate("kvbm_unloaded_blocks_total", by=("reason",)),),
            ),
        ),
    ),
    Row(
        "Cache hit",
        (
            original("Host Cache Hit Rate", "kvbm_host_cache_hit_rate", "percentunit"),
            original("Disk Cache Hit Rate", "kvbm_disk_cache_hit_rate", "percentunit"),
            original("Object Cache Hit Rate", "kvbm_object_cache_hit_rate", "percentunit"),
            original("Matched Tokens", "kvbm_matched_tokens"),
        ),
    ),
    Row(
        "Offload",
        (
            original("Offload Blocks - Device to Host", "kvbm_offload_blocks_d2h"),
            original("Offload Blocks - Host to Disk", "kvbm_offload_blocks_h2d"),
            original("Offload Blocks - Device to Disk (Bypass Host)", "kvbm_offload_blocks_d2d"),
            original("Offload Blocks - Device to Object Storage", "kvbm_offload_blocks_d2o"),
        ),
    ),
    Row(
        "Onboard",
        (
            original("Onboard Blocks - Host to Device", "kvbm_onboard_blocks_h2d"),
            original("Onboard Blocks - Disk to Device", "kvbm_onboard_blocks_d2d"),
            original("Onboard Blocks - Object Storage to Device", "kvbm_onboard_blocks_o2d"),
        ),
    ),
    Row(
        "Flows and queues",
        (
            Panel(
                "Flows between tiers",
                "Bps",
                "Bytes that arrived. Compare with what memory, link and disk can do.",
                (rate("kvbm_transfer_bytes_total", by=("source", "target")),),
            ),
            Panel(
                "Time of a transfer",
                "s",
                "A transfer is a batch of blocks that were moved together.",
                tuple(
                    quantile("kvbm_transfer_seconds", share, ("source", "target")) for share in (0.5, 0.99)
                ),
            ),
            Panel(
                "Size of a transfer",
                "bytes",
                "Small transfers are slow ones: more of their time is overhead.",
                (quantile("kvbm_transfer_size_bytes", 0.5, ("source", "target")),),
            ),
            Panel(
                "Queues",
                "short",
                "Blocks on their way between host memory and disk, or a remote store. A queue that only grows: the "
                "disk or the store is too slow for what is written to it, or it hangs.",
                (plain("kvbm_queue_blocks", by=("queue",)),),
            ),
            Panel(
                "Oldest in a queue",
                "s",
                "How long the oldest block waits: for its turn, and for the disk. Loads that wait for seconds come "
                "too late to be worth it; blocks that wait long to be written may be evicted before their turn.",
                (worst("kvbm_queue_age_seconds", ("queue",)),),
            ),
            Panel(
                "Not offloaded",
                "short",
                "Blocks a second that were not offloaded, by reason.",
                (rate("kvbm_skipped_offloads_total", by=("reason",)),),
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
                    plain("kvbm_pool_blocks", by=("tier", "state")),
                    plain("kvbm_pool_capacity_blocks", "{{tier}} capacity", ("tier",)),
                ),
            ),
            Panel(
                "Namespaces",
                "short",
                "Blocks of each namespace by tier, and how many a second were dropped: who fills the tiers, and who "
                "loses blocks.",
                (
                    plain("kvbm_namespace_blocks", by=("namespace", "tier")),
                    rate(
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
                (rate("kvbm_evicted_blocks_total", by=("tier", "reason")),),
            ),
            Panel(
                "Favoured blocks",
                "short",
                "Blocks that clients asked to be kept, those of them a second that had to go, and blocks a second that "
                "were next to be evicted and were passed over: as they are retained, or for their cache salt's share.",
                (
                    plain("kvbm_retained_blocks", "{{tier}} retained", ("tier",)),
                    rate("kvbm_evicted_retained_blocks_total", "{{tier}} retained and dropped", ("tier",)),
                    rate("kvbm_spared_blocks_total", by=("tier", "favour")),
                ),
            ),
            Panel(
                "Leases",
                "short",
                "Blocks that are pinned for a request, and leases a second that ended only at their "
                "deadline: their engine died or hangs.",
                (
                    plain("kvbm_leased_blocks", "{{tier}} leased", ("tier",)),
                    plain("kvbm_leases", "leases"),
                    rate("kvbm_leases_expired_total", "expired leases"),
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
                "Requests a second by kind, as stores bill them, and those that failed; packs that were touched as "
                "they are in use, and compressed ones that were left alone.",
                (
                    rate("kvbm_remote_requests_total", by=("kind",)),
                    rate("kvbm_remote_errors_total", "{{operation}} failed", ("operation",)),
                    rate("kvbm_remote_touched_packs_total", "packs touched"),
                    rate("kvbm_remote_compressed_packs_total", "compressed packs"),
                ),
            ),
            Panel(
                "Latency of a read",
                "s",
                "As it is expected now, of the slowest manager. Loads are only begun where computing would take "
                "longer.",
                (worst("kvbm_remote_latency_seconds", ()),),
            ),
            Panel(
                "Known in remote stores",
                "short",
                "Blocks, and the packs that they lie in, of which managers know where they lie; each manager counts "
                "what it knows, so what several know is counted several times.",
                (
                    plain("kvbm_remote_known_blocks", "blocks"),
                    plain("kvbm_remote_known_packs", "packs"),
                ),
            ),
            Panel(
                "Breakers",
                "short",
                "One of each namespace for reads, and one for writes. open: the store is not asked for a while.",
                (plain("kvbm_remote_breakers", by=("operation", "state")),),
            ),
            Panel(
                "Not written to a store",
                "short",
                "Blocks a second by reason. evicted: host memory had no room until their turn came. budget: the bound "
                "on bytes or requests an hour. tier_off: the store was off.",
                (rate("kvbm_remote_skipped_blocks_total", by=("reason",)),),
            ),
            Panel(
                "Other nodes read from",
                "short",
                "Once for each namespace, by how the last block came: over the connection (tcp) or by NIXL.",
                (plain("kvbm_peer_links", by=("transport",)),),
            ),
            Panel(
                "Other nodes reached",
                "short",
                "Nodes of the fleet, once for each namespace: `kvbm status` says why some are not reached. away: "
                "managers for which nothing lists the nodes now.",
                (
                    plain("kvbm_peer_nodes", by=("reached",)),
                    plain("kvbm_peer_directory_away", "away"),
                ),
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
                (rate("kvbm_hints_total", by=("part", "outcome", "reason")),),
            ),
            Panel(
                "Brought up before it was asked for",
                "short",
                "Blocks a second from disk to host memory, by cause; and those that were not brought up for want of "
                "room.",
                (
                    rate("kvbm_prefetched_blocks_total", by=("cause",)),
                    rate("kvbm_prefetch_refused_blocks_total", "{{cause}} refused", ("cause",)),
                ),
            ),
            Panel(
                "Was it of use?",
                "short",
                "What became of those blocks. Many that are evicted or unasked: clients expect what does not come.",
                (rate("kvbm_prefetched_blocks_ended_total", by=("cause", "fate")),),
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
                    rate("kvbm_failures_total", by=("tier", "kind")),
                    rate("kvbm_recompute_fallbacks_total", "{{engine}} loads computed instead", ("engine",)),
                ),
            ),
            Panel(
                "Tried again",
                "ops",
                "Lookups whose first answer no longer held, stores of blocks for which there had been no room, and "
                "starts of a tier that is off.",
                (rate("kvbm_retries_total", by=("operation",)),),
            ),
            Panel(
                "Object storage failures",
                "short",
                "The original's counters.",
                (plain("kvbm_object_read_failures", "read"), plain("kvbm_object_write_failures", "write")),
            ),
            Panel(
                "Tiers that work", "short", "0: off after a fault.", (plain("kvbm_tier_up", by=("tier",)),)
            ),
            Panel(
                "Engines and sessions",
                "short",
                "What is connected.",
                (plain("kvbm_engines", "engines"), plain("kvbm_sessions", by=("role",))),
            ),
        ),
    ),
)
"""The dashboard, from the top down. The rows Cache hit, Offload and Onboard are the original's."""
