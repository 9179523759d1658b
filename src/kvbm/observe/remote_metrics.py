"""The rows of the table of metrics about remote stores (G4): a part of `metric_table.TABLE`."""

from __future__ import annotations

from kvbm.observe.metric_kinds import Label, Metric, MetricKind

REMOTE = "remote"
"""The tier that has these series."""

_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
_OPERATION = Label("operation", ("read", "write"))

REQUESTS = ("put", "get", "list", "delete")
"""The kinds of requests to a store."""
BREAKER_STATES = ("closed", "open", "half-open")
TRANSPORTS = ("tcp", "nixl")
"""How blocks come from other nodes' memory."""
REACHED = ("yes", "no")

REMOTE_METRICS: tuple[Metric, ...] = (
    Metric(
        name="kvbm_remote_requests_total",
        kind=_COUNTER,
        help="Requests to remote stores by kind, as they are billed; what a client library repeats by itself is not "
        "counted",
        labels=(Label("kind", REQUESTS),),
        at_zero=True,
        only_of=REMOTE,
    ),
    Metric(
        name="kvbm_remote_errors_total",
        kind=_COUNTER,
        help="Requests to remote stores that failed or came too late: reads, writes, and those that say what is in use "
        "(touch)",
        labels=(Label("operation", ("read", "write", "touch")),),
        at_zero=True,
        only_of=REMOTE,
    ),
    Metric(
        name="kvbm_remote_known_blocks",
        kind=_GAUGE,
        help="Blocks in remote stores of which this manager knows where they lie",
    ),
    Metric(name="kvbm_remote_known_packs", kind=_GAUGE, help="The packs that they lie in"),
    Metric(
        name="kvbm_remote_breakers",
        kind=_GAUGE,
        help="Circuit breakers of remote stores by state, one of each namespace for reads and one for writes: closed "
        "(works), open (nothing is asked for a while), half-open (it is being tried)",
        labels=(_OPERATION, Label("state", BREAKER_STATES)),
    ),
    Metric(
        name="kvbm_remote_touched_packs_total",
        kind=_COUNTER,
        help="Packs of which this manager told a remote store that they are in use",
        at_zero=True,
        only_of=REMOTE,
    ),
    Metric(
        name="kvbm_remote_latency_seconds",
        kind=_GAUGE,
        help="Time from a read's request to its first byte as it is expected now, that of the slowest namespace",
    ),
    Metric(
        name="kvbm_remote_compressed_packs_total",
        kind=_COUNTER,
        help="Compressed packs that were met in remote stores and left alone: versions that compress wrote them",
        at_zero=True,
        only_of=REMOTE,
    ),
    Metric(
        name="kvbm_peer_links",
        kind=_GAUGE,
        help="Nodes of the fleet whose memory is read, once for each namespace, by how the last block came: over the "
        "connection (tcp) or by NIXL (nixl)",
        labels=(Label("transport", TRANSPORTS),),
    ),
    Metric(
        name="kvbm_peer_nodes",
        kind=_GAUGE,
        help="Other nodes of the fleet, once for each namespace: those that can be read from now (yes), and those that "
        "cannot (no); `kvbm status` says why",
        labels=(Label("reached", REACHED),),
    ),
    Metric(
        name="kvbm_peer_directory_away",
        kind=_GAUGE,
        help="1 while what lists the nodes of the fleet does not answer: those last heard of are kept",
    ),
    Metric(
        name="kvbm_remote_skipped_blocks_total",
        kind=_COUNTER,
        help="Blocks that were not written to a remote store, by reason: refused by the admission policy (filter), "
        "beyond the hour's budget of bytes or requests (budget), queue full, evicted before their turn, store "
        "off, or with encryption nobody knows whose they are (no_tenant)",
        labels=(Label("reason", ("filter", "budget", "queue_full", "evicted", "tier_off", "no_tenant")),),
        at_zero=True,
        only_of=REMOTE,
    ),
)
