"""The table of all metrics: names, kinds, labels and help. `metrics` counts, and can count nothing else."""

from __future__ import annotations

from kvbm.hints import PARTS, Outcome, Why
from kvbm.observe.metric_kinds import Label, Metric, MetricKind
from kvbm.observe.remote_metrics import REMOTE_METRICS

TIERS = ("device", "host", "disk", "remote")
"""The names of the tiers in labels, from the top down."""

CACHE_TIERS = ("host", "disk", "remote")
"""The tiers that a manager can have."""

TIER_LABEL = "tier"
"""The label whose value is one of `TIERS`, in metrics of what is kept there."""

TRANSFER_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds of the transfer histogram, for anything from one small block in memory to a batch on a slow disk."""

SIZE_BUCKETS_BYTES = tuple(float(4**power) for power in range(6, 18))
"""Upper bounds of the sizes of transfers: 4 KiB to 16 GiB."""

OTHER_ENGINES = "other"
"""The `engine` label of engines beyond those that have names of their own."""

OTHER_NAMESPACES = "other"
"""The `namespace` label of namespaces beyond those that have names of their own."""

MISSED_REASONS = (
    "never_seen",
    "evicted",
    "expired",
    "reset",
    "failed_checksum",
    "refused_by_filter",
    "not_written",
    "not_stored",
    "no_state_at_boundary",
    "model_changed",
    "adapter_changed",
    "weights_changed",
    "salt_changed",
    "extras_changed",
    "unavailable",
    "store_off",
)
"""Why a lookup found nothing."""

PREFETCH_CAUSES = ("operator", "session", "expected", "parent")
"""Why blocks are brought up before an engine asks for them."""

_CAUSE = Label("cause", PREFETCH_CAUSES)
_SOURCE = Label("source", TIERS)
_TARGET = Label("target", TIERS)
_TIER = Label(TIER_LABEL, TIERS)
_QUEUE = Label("queue", ("offload", "onboard", "remote_offload", "remote_onboard"))
_ENGINE = Label("engine", (OTHER_ENGINES,), open=True)
_NAMESPACE = Label("namespace", (OTHER_NAMESPACES,), open=True)


def _compatible(name: str, kind: MetricKind, text: str) -> Metric:
    return Metric(name=name, kind=kind, help=text, compatible=True)


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

TABLE: tuple[Metric, ...] = (
    _compatible("kvbm_offload_blocks_d2h", _COUNTER, "The number of offload blocks from device to host"),
    _compatible("kvbm_offload_blocks_h2d", _COUNTER, "The number of offload blocks from host to disk"),
    _compatible(
        "kvbm_offload_blocks_d2d",
        _COUNTER,
        "The number of offload blocks from device to disk (bypassing host memory)",
    ),
    _compatible(
        "kvbm_offload_blocks_d2o", _COUNTER, "The number of offload blocks from device to object storage"
    ),
    _compatible("kvbm_onboard_blocks_h2d", _COUNTER, "The number of onboard blocks from host to device"),
    _compatible("kvbm_onboard_blocks_d2d", _COUNTER, "The number of onboard blocks from disk to device"),
    _compatible(
        "kvbm_onboard_blocks_o2d", _COUNTER, "The number of onboard blocks from object storage to device"
    ),
    _compatible("kvbm_matched_tokens", _COUNTER, "The number of matched tokens"),
    _compatible("kvbm_host_cache_hit_rate", _GAUGE, "Host cache hit rate (0.0-1.0) from the sliding window"),
    _compatible("kvbm_disk_cache_hit_rate", _GAUGE, "Disk cache hit rate (0.0-1.0) from the sliding window"),
    _compatible(
        "kvbm_object_cache_hit_rate",
        _GAUGE,
        "Object storage cache hit rate (0.0-1.0) from the sliding window",
    ),
    _compatible(
        "kvbm_object_read_failures",
        _COUNTER,
        "The number of failed object storage read operations (blocks)",
    ),
    _compatible(
        "kvbm_object_write_failures",
        _COUNTER,
        "The number of failed object storage write operations (blocks)",
    ),
    Metric(
        name="kvbm_transfer_bytes_total",
        kind=_COUNTER,
        help="Bytes moved from one tier to another, counted after the move has succeeded",
        labels=(_SOURCE, _TARGET),
    ),
    Metric(
        name="kvbm_transfer_seconds",
        kind=_HISTOGRAM,
        help="Time that one transfer from one tier to another took",
        labels=(_SOURCE, _TARGET),
        buckets=TRANSFER_BUCKETS_S,
    ),
    Metric(
        name="kvbm_transfer_size_bytes",
        kind=_HISTOGRAM,
        help="Bytes of one transfer from one tier to another",
        labels=(_SOURCE, _TARGET),
        buckets=SIZE_BUCKETS_BYTES,
    ),
    Metric(
        name="kvbm_queue_blocks",
        kind=_GAUGE,
        help="Blocks that wait in a queue or are in flight from it",
        labels=(_QUEUE,),
    ),
    Metric(
        name="kvbm_queue_age_seconds",
        kind=_GAUGE,
        help="How long the oldest block of a queue has waited for its turn and for the medium; 0 if the queue is empty",
        labels=(_QUEUE,),
    ),
    Metric(
        name="kvbm_pool_blocks",
        kind=_GAUGE,
        help="Slots of a tier by state; the states add up to the tier's capacity. If disk is the only tier, host is "
        "its staging area",
        labels=(_TIER, Label("state", ("free", "filling", "resident"))),
    ),
    Metric(
        name="kvbm_pool_capacity_blocks", kind=_GAUGE, help="Blocks that a tier can hold", labels=(_TIER,)
    ),
    Metric(
        name="kvbm_namespace_blocks",
        kind=_GAUGE,
        help="Resident blocks of a namespace (model, and the beginning of its fingerprint) in a tier",
        labels=(_NAMESPACE, _TIER),
    ),
    Metric(
        name="kvbm_namespace_evicted_blocks_total",
        kind=_COUNTER,
        help="Blocks of a namespace that were dropped from a tier, for any reason",
        labels=(_NAMESPACE, _TIER),
    ),
    Metric(
        name="kvbm_leased_blocks",
        kind=_GAUGE,
        help="Resident blocks that a lease keeps from eviction",
        labels=(_TIER,),
    ),
    Metric(
        name="kvbm_retained_blocks",
        kind=_GAUGE,
        help="Resident blocks that clients asked to be kept, and that are preferred for that",
        labels=(_TIER,),
    ),
    Metric(
        name="kvbm_evicted_retained_blocks_total",
        kind=_COUNTER,
        help="Of the blocks dropped to make room, those that were retained: nothing else could go",
        labels=(_TIER,),
        at_zero=True,
    ),
    Metric(
        name="kvbm_spared_blocks_total",
        kind=_COUNTER,
        help="Blocks that were next to be evicted and were passed over, because they are retained (retention), or "
        "because their cache salt holds no more than it is sure of (share)",
        labels=(_TIER, Label("favour", ("retention", "share"))),
        at_zero=True,
    ),
    Metric(
        name="kvbm_evicted_blocks_total",
        kind=_COUNTER,
        help="Blocks dropped from a tier, by reason: chosen by the policy to make room (capacity), the whole tier was "
        "dropped (reset), a checksum did not match (corrupt), the medium did not have them (missing), they were gone "
        "when the tier came back after a fault (tier_off), their client said that they may go down, and they lie on "
        "disk too (demoted), their client wanted them kept for no longer (expired)",
        labels=(
            _TIER,
            Label("reason", ("capacity", "reset", "corrupt", "missing", "tier_off", "demoted", "expired")),
        ),
        at_zero=True,
    ),
    Metric(
        name="kvbm_failures_total",
        kind=_COUNTER,
        help="Blocks that could not be read, written or loaded, by tier: corrupt (a checksum did not match), io, load "
        "(found in this tier and promised, but not copied to the device)",
        labels=(_TIER, Label("kind", ("corrupt", "io", "load"))),
        at_zero=True,
    ),
    Metric(
        name="kvbm_retries_total",
        kind=_COUNTER,
        help="What was tried again: a lookup whose first answer no longer held, a store of blocks for which there had "
        "been no room, starting a tier that is off",
        labels=(Label("operation", ("lookup", "store", "tier")),),
        at_zero=True,
    ),
    Metric(
        name="kvbm_skipped_offloads_total",
        kind=_COUNTER,
        help="Blocks that were not offloaded, by reason: no room (full), refused by the admission policy (filter), "
        "beyond the day's write budget (budget), queue full, evicted before their turn, tier off; a block for which "
        "there was no room is offered again, and counts each time",
        labels=(Label("reason", ("full", "filter", "budget", "queue_full", "evicted", "tier_off")),),
        at_zero=True,
    ),
    *REMOTE_METRICS,
    Metric(
        name="kvbm_hints_total",
        kind=_COUNTER,
        help="Parts of what clients say of their requests, by what became of them: accepted, clipped or rejected; and "
        "why: not of that form, out of bounds, unknown, budget used up, client doubted, nothing to do",
        labels=(
            Label("part", PARTS),
            Label("outcome", tuple(each.value for each in Outcome)),
            Label("reason", tuple(each.value for each in Why)),
        ),
    ),
    Metric(
        name="kvbm_prefetched_blocks_total",
        kind=_COUNTER,
        help="Blocks brought up from disk before an engine asked for them, by cause: an operator said so, a session's "
        "client said so (session), the session is expected back (expected), a session that it is the parent of ends "
        "(parent)",
        labels=(_CAUSE,),
        at_zero=True,
    ),
    Metric(
        name="kvbm_prefetched_blocks_ended_total",
        kind=_COUNTER,
        help="What became of them: an engine asked for them (asked), they left host memory before that (evicted), or "
        "nobody had asked for ten minutes (unasked)",
        labels=(_CAUSE, Label("fate", ("asked", "evicted", "unasked"))),
        at_zero=True,
    ),
    Metric(
        name="kvbm_prefetch_refused_blocks_total",
        kind=_COUNTER,
        help="Blocks that were to be brought up so and were not: over what may be brought up unasked, no room in host "
        "memory, or engines kept the disk busy for ten minutes",
        labels=(_CAUSE,),
        at_zero=True,
    ),
    Metric(
        name="kvbm_lookups_total",
        kind=_COUNTER,
        help="Prefix lookups by outcome: hit (at least one block), miss, or throttled (too many leases)",
        labels=(Label("outcome", ("hit", "throttled", "miss")),),
        at_zero=True,
    ),
    Metric(
        name="kvbm_missed_lookups_total",
        kind=_COUNTER,
        help="Lookups that found nothing, by what became of the first block, as kvbm why names it: nobody had asked "
        "for it (never_seen), it was stored and has gone (evicted, expired, reset, failed_checksum, refused_by_filter, "
        "not_written), it was not stored (not_stored), the same tokens are known under another key (model_changed, "
        "adapter_changed, weights_changed, salt_changed, extras_changed), a rank of the engine was away (unavailable), "
        "it lies in a remote store that is off (store_off)",
        labels=(Label("reason", MISSED_REASONS),),
        at_zero=True,
    ),
    Metric(
        name="kvbm_queried_blocks_total",
        kind=_COUNTER,
        help="Blocks that lookups asked for, without those that the device held: the denominator of hit rates",
        at_zero=True,
    ),
    Metric(
        name="kvbm_hit_blocks_total",
        kind=_COUNTER,
        help="Blocks of prompts that lookups found and leased, by the tier that held them",
        labels=(_TIER,),
        at_zero=True,
    ),
    Metric(
        name="kvbm_hit_bytes_total",
        kind=_COUNTER,
        help="Bytes of the blocks, of all groups, that lookups found and leased, by the tier that held them",
        labels=(_TIER,),
        at_zero=True,
    ),
    Metric(
        name="kvbm_unloaded_blocks_total",
        kind=_COUNTER,
        help="Blocks that were found beyond those on the device, but that engines computed, by reason: computing was "
        "faster (cost), the answer or the bytes came too late (deadline), host memory had no room for them "
        "(no_room), a lease or a session had ended (stale), the tier refused them or found them damaged "
        "(refused), a rank could not copy them (failed), the engine continued without them (unused)",
        labels=(Label("reason", ("cost", "deadline", "no_room", "stale", "refused", "failed", "unused")),),
        at_zero=True,
    ),
    Metric(
        name="kvbm_saved_prefill_seconds_total",
        kind=_COUNTER,
        help="Seconds that engines would have computed the blocks that reached the device, as they measure their steps",
        at_zero=True,
    ),
    Metric(
        name="kvbm_lost_prefixes_total",
        kind=_COUNTER,
        help="Lookups that found no block, although one of the latest requests began with the same block",
        at_zero=True,
    ),
    Metric(
        name="kvbm_disk_write_bytes_per_hit_byte",
        kind=_GAUGE,
        help="Bytes written to disk for each byte that was found there, since the start; absent before the first hit",
    ),
    Metric(
        name="kvbm_sessions",
        kind=_GAUGE,
        help="Connected sessions by role",
        labels=(Label("role", ("leader", "worker", "admin")),),
    ),
    Metric(
        name="kvbm_tier_up",
        kind=_GAUGE,
        help="1 while a configured tier works, 0 while it is off after a fault or slow",
        labels=(_TIER,),
    ),
    Metric(
        name="kvbm_leases_expired_total",
        kind=_COUNTER,
        help="Leases that ended at their deadline, not by a release",
        at_zero=True,
    ),
    Metric(name="kvbm_engines", kind=_GAUGE, help="Engines that are connected"),
    Metric(
        name="kvbm_leases",
        kind=_GAUGE,
        help="Leases: lookups whose blocks are kept from eviction for an engine",
    ),
    Metric(
        name="kvbm_queried_tokens_total",
        kind=_COUNTER,
        help="Tokens that an engine's lookups asked for, without those that the device held",
        labels=(_ENGINE,),
    ),
    Metric(
        name="kvbm_hit_tokens_total",
        kind=_COUNTER,
        help="Tokens that an engine's lookups found, by the tier that held them",
        labels=(_ENGINE, _TIER),
    ),
    Metric(
        name="kvbm_recompute_fallbacks_total",
        kind=_COUNTER,
        help="Loads of which some promised blocks did not reach the device, so that the engine computed them",
        labels=(_ENGINE,),
    ),
    Metric(
        name="kvbm_lookup_answer_seconds",
        kind=_HISTOGRAM,
        help="Time from a lookup to its answer as the engine saw it, whether or not something was found",
        labels=(_ENGINE,),
        buckets=TRANSFER_BUCKETS_S,
    ),
    Metric(
        name="kvbm_reserve_answer_seconds",
        kind=_HISTOGRAM,
        help="Time from a reservation to its answer as the engine saw it, for those that got slots; the engine looks "
        "for answers once a step",
        labels=(_ENGINE,),
        buckets=TRANSFER_BUCKETS_S,
    ),
    Metric(
        name="kvbm_load_wait_seconds",
        kind=_HISTOGRAM,
        help="Time from a lookup to the end of its load as the engine saw it: its turn in the queues included",
        labels=(_ENGINE,),
        buckets=TRANSFER_BUCKETS_S,
    ),
)
"""Every metric. Others cannot be counted."""

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in TABLE}
