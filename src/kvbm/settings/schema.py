"""Every setting, declared once: its type, its names, its meaning and its default.

The settings' sources, the flags of `kvbm manager`, the notices and the page of the docs are derived from these rows.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_type_hints

import msgspec

from kvbm.settings.parse import LOG_LEVELS
from kvbm.settings.places import default_runtime_dir
from kvbm.settings.remote_schema import RemoteSettings
from kvbm.settings.setting import Kind, Setting, declared

PREFIX = "DYN_KVBM_"
FILE_VARIABLE = "DYN_KVBM_CONFIG"
"""The variable that names the settings file (ours)."""

PORT_MAX = 65535
CONSOLIDATOR_PORT_OFFSET = 1000
"""The event consolidator listens this far above `leader_pub_port`, as in the original."""


class Settings(RemoteSettings, frozen=True, kw_only=True):
    """Every setting, checked. Sizes are bytes, times are seconds.

    `None` for a tier's size means that the tier is off, unless its block count is set, which wins over bytes.
    """

    host_bytes: Annotated[
        int | None,
        Setting("DYN_KVBM_CPU_CACHE_GB", "--host-memory", Kind.SIZE, default_text="see above"),
        "size of the host tier (G2); 0 is off",
    ] = None
    host_blocks: Annotated[
        int | None,
        Setting("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "--host-blocks"),
        "exact number of host blocks; wins over the size; 0 is no override",
    ] = None
    disk_bytes: Annotated[
        int | None,
        Setting("DYN_KVBM_DISK_CACHE_GB", "--disk", Kind.SIZE),
        "size of the disk tier (G3) of one manager; each engine with a private manager takes this much, and "
        "directories that nobody owns come on top (DYN_KVBM_DISK_UNOWNED_GB); 0 is off",
    ] = None
    disk_blocks: Annotated[
        int | None,
        Setting("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", "--disk-blocks"),
        "exact number of disk blocks; wins over the size; 0 is no override",
    ] = None
    disk_dir: Annotated[
        str,
        Setting("DYN_KVBM_DISK_CACHE_DIR", "--disk-dir", Kind.PATH, needs="disk"),
        "directory of the disk tier's files",
    ] = "/tmp/"
    disk_persist: Annotated[
        bool,
        Setting("DYN_KVBM_DISK_PERSIST", "--disk-persist", ours=True, needs="disk"),
        "keep the disk tier's blocks over a restart",
    ] = True
    disk_unowned_bytes: Annotated[
        int | None,
        Setting("DYN_KVBM_DISK_UNOWNED_GB", "--disk-unowned", Kind.SIZE, ours=True, needs="disk"),
        "limit for the disk tier's directories that no process owns, over all models; those that were opened, "
        "written or closed longest ago are removed first. Unset, it is eight times the largest tier there, and "
        "directories used within seven days stay beyond it. 0 keeps none",
    ] = None
    disk_allocator: Annotated[
        Literal["default", "open-direct"],
        Setting("DYN_KVBM_DISK_ALLOCATOR_TYPE", no_effect="O_DIRECT is always asked for in the open call"),
        "when O_DIRECT is set on the disk tier's files: after opening, or in the open call",
    ] = "default"
    disk_zerofill_fallback: Annotated[
        bool,
        Setting("DYN_KVBM_DISK_ZEROFILL_FALLBACK", "--disk-zerofill-fallback", needs="disk"),
        "write zeros where the file system has no fallocate",
    ] = False
    disk_o_direct: Annotated[
        bool,
        Setting("DYN_KVBM_DISK_DISABLE_O_DIRECT", "--disk-o-direct", inverted=True, needs="disk"),
        "read and write the disk past the page cache",
    ] = True
    disk_offload_filter: Annotated[
        bool,
        Setting("DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER", "--disk-offload-filter", inverted=True, needs="disk"),
        "write a block to disk only when it is offloaded a second time: on is the admission policy `filter`, "
        "off is `all`",
    ] = True
    disk_admission: Annotated[
        str | None,
        Setting(
            "DYN_KVBM_DISK_ADMISSION",
            "--disk-admission",
            metavar="POLICY",
            default_text="`filter`",
            ours=True,
            needs="disk",
        ),
        "policy that decides which blocks may enter disk: filter, all, ghost (blocks that are offered again "
        "within twice the tier's slots), or a policy of an installed package; wins over the switch above, "
        "unless the switch comes from a source of higher precedence",
    ] = None
    disk_write_budget_bytes: Annotated[
        int,
        Setting(
            "DYN_KVBM_DISK_WRITE_BUDGET",
            "--disk-write-budget",
            Kind.SIZE,
            default_text="no limit",
            ours=True,
            needs="disk",
        ),
        "limit for the bytes written to disk in 24 hours, over all namespaces, a 24th of it at once; 0 is no "
        "limit",
    ] = 0
    eviction: Annotated[
        str,
        Setting("DYN_KVBM_EVICTION", "--eviction", metavar="POLICY", ours=True),
        "policy that decides which block a full tier evicts: gittins, lru, or a policy of an installed package",
    ] = "gittins"
    salt_share: Annotated[
        float,
        Setting("DYN_KVBM_SALT_SHARE", "--salt-share", ours=True),
        "part of an equal share of each tier that every active cache salt is sure of, whatever others store: 1 is "
        "the whole share, 0 nothing; requests without a salt count as one",
    ] = 0.5
    onboard: Annotated[
        Literal["measured", "always"],
        Setting("DYN_KVBM_ONBOARD", ours=True, reader="engine"),
        "when a hit is loaded: while loading is measured to be faster than computing, or always, as the original does",
    ] = "measured"
    onboard_mode: Annotated[
        Literal["auto", "async", "layerwise"],
        Setting("DYN_KVBM_ONBOARD_MODE", ours=True, reader="engine"),
        "how a hit is loaded: before its request is scheduled (async), or layer by layer beside the forward "
        "pass, each layer before it is used, if a part of the prompt must be computed anyway and the whole hit "
        "lies in host memory (layerwise: CUDA graphs become piecewise; needs kv_load_failure_policy=fail, or "
        "Model Runner V1 without asynchronous scheduling); auto is layerwise where that costs no graphs and a "
        "failed load is computed again, as on a CPU, and async elsewhere",
    ] = "auto"
    cuda_copy: Annotated[
        Literal["auto", "batch", "rows", "kernel"],
        Setting("DYN_KVBM_CUDA_COPY", ours=True, reader="engine"),
        "how blocks are copied on CUDA: in batches by the copy engines (in rows, where the driver has no batches), and "
        "loads of small pieces by a kernel (auto); or always in batches, in rows, or by the kernel",
    ] = "auto"
    kv_layout: Annotated[
        Literal["engine", "block"],
        Setting("DYN_KVBM_KV_LAYOUT", ours=True, reader="engine"),
        "layout of the KV cache: as the engine chooses it, or all layers of a block side by side, if the "
        "engine's attention can read that (block; vLLM from 0.29 on)",
    ] = "engine"
    numa: Annotated[
        bool,
        Setting("DYN_MEMORY_DISABLE_NUMA", inverted=True, reader="engine"),
        "place each rank's host memory next to its GPU",
    ] = True
    huge_pages: Annotated[
        bool,
        Setting("DYN_KVBM_HUGE_PAGES", "--huge-pages", ours=True, reader="both"),
        "ask the kernel for huge pages of host memory, or, when off, for none: each process asks for its own view, so "
        "set it for the manager and for the engines (a program's own BlockManager has the argument huge_pages)",
    ] = True
    staging_bytes: Annotated[
        int,
        Setting("DYN_KVBM_DISK_STAGING_GB", "--disk-staging", Kind.SIZE, minimum=1, ours=True, needs="disk"),
        "host memory that blocks pass through when there is a disk tier and no host tier",
    ] = 512_000_000
    max_concurrent_transfers: Annotated[
        int,
        Setting(
            "DYN_KVBM_MAX_CONCURRENT_TRANSFERS",
            "--max-concurrent-transfers",
            minimum=1,
            maximum=4096,
            needs="disk",
        ),
        "batches in flight from host to disk at one time; only the product with the batch size counts, 48 "
        "blocks at most",
    ] = 4
    max_transfer_batch_size: Annotated[
        int,
        Setting(
            "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE",
            "--max-transfer-batch-size",
            minimum=1,
            maximum=65536,
            needs="disk",
        ),
        "blocks in one batch from host to disk; only the product with the number of batches counts",
    ] = 16
    offload_min_priority: Annotated[
        int,
        Setting(
            "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
            maximum=100,
            reader="engine",
        ),
        "stop offloading a request at its first block of a lower retention priority (TensorRT-LLM)",
    ] = 0
    metrics: Annotated[
        bool,
        Setting("DYN_KVBM_METRICS", "--metrics"),
        "serve /metrics over HTTP",
    ] = False
    metrics_host: Annotated[
        str,
        Setting("DYN_KVBM_METRICS_HOST", "--metrics-host", metavar="ADDRESS", ours=True, needs="metrics"),
        "address that /metrics listens on, by default all of this machine's; 127.0.0.1 keeps other machines out",
    ] = "0.0.0.0"
    metrics_port: Annotated[
        int,
        Setting(
            "DYN_KVBM_METRICS_PORT", "--metrics-port", Kind.PORT, minimum=1, maximum=PORT_MAX, needs="metrics"
        ),
        "port of /metrics; an engine's own manager takes the next free one",
    ] = 6880
    admin_http: Annotated[
        str | None,
        Setting("DYN_KVBM_ADMIN_HTTP", "--admin-http", Kind.LISTEN, metavar="ADDRESS", ours=True),
        "address of the web page and the admin API: 127.0.0.1:6881, or unix:PATH; only programs of this machine "
        "reach it. Unset is off; an engine's own manager takes the next free port",
    ] = None
    events_endpoint: Annotated[
        str | None,
        Setting("DYN_KVBM_EVENTS_ENDPOINT", "--events", Kind.ENDPOINT, metavar="ENDPOINT", ours=True),
        "publish KV events of host memory and disk for routers here, in vLLM's form: tcp://127.0.0.1:5557, "
        "tcp://*:5557 (whoever connects reads all prompts that are kept) or ipc://PATH. Unset is off",
    ] = None
    events_replay_endpoint: Annotated[
        str | None,
        Setting(
            "DYN_KVBM_EVENTS_REPLAY_ENDPOINT",
            "--events-replay",
            Kind.ENDPOINT,
            metavar="ENDPOINT",
            ours=True,
            needs="events",
        ),
        "where routers ask for events that they missed, in the same forms",
    ] = None
    manager: Annotated[
        str | None,
        Setting("DYN_KVBM_MANAGER", "--socket", Kind.SOCKET, ours=True, reader="both"),
        "socket of a shared manager; unset, an engine starts a private one",
    ] = None
    peer_uids: Annotated[
        tuple[int, ...],
        Setting(
            "DYN_KVBM_PEER_UIDS", "--peer-uids", Kind.USERS, default_text="none", ours=True, reader="both"
        ),
        "user ids, besides one's own and root's, that may be at the other end of a named socket, for example "
        "between containers; set it at both ends",
    ] = ()
    runtime_dir: Annotated[
        str,
        Setting(
            "DYN_KVBM_RUNTIME_DIR",
            "--runtime-dir",
            Kind.PATH,
            default_text="`$XDG_RUNTIME_DIR/kvbm`, or `/tmp/kvbm-<uid>`",
            ours=True,
            reader="both",
        ),
        "directory of sockets and locks",
    ] = msgspec.field(default_factory=default_runtime_dir)
    init_timeout_s: Annotated[
        int,
        Setting("DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS", kind=Kind.SECONDS, minimum=1, reader="engine"),
        "how long an engine waits at its start for its private manager, before the start fails",
    ] = 1800
    stats_window_requests: Annotated[
        int,
        Setting("DYN_KVBM_CACHE_STATS_MAX_REQUESTS", minimum=1, maximum=10000000),
        "number of latest requests that the hit rates are taken over",
    ] = 1000
    stats_log_interval_s: Annotated[
        int,
        Setting("DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS", kind=Kind.SECONDS),
        "least time between two lines of hit rates of an engine in the log, with eight engines at most in that time",
    ] = 60
    consolidator: Annotated[
        bool,
        Setting("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", reader="engine"),
        "merge the engine's KV events of all tiers into one stream for routers, where Dynamo asks for it",
    ] = True
    consolidator_mode: Annotated[
        Literal["dedup", "passthrough"],
        Setting("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", reader="engine"),
        "one event per block over all tiers, or every event with its tier",
    ] = "dedup"
    leader_pub_port: Annotated[
        int,
        Setting(
            "DYN_KVBM_LEADER_ZMQ_PUB_PORT",
            kind=Kind.PORT,
            minimum=1,
            maximum=PORT_MAX - CONSOLIDATOR_PORT_OFFSET,
            reader="engine",
        ),
        "base port: the event consolidator listens 1000 above it, or on the next free port",
    ] = 56001
    trtllm_events_port: Annotated[
        int | None,
        Setting(
            "DYN_KVBM_TRTLLM_ZMQ_PORT",
            kind=Kind.PORT,
            minimum=1,
            maximum=PORT_MAX,
            reader="engine",
        ),
        "port of this machine on which TensorRT-LLM's KV events are published, for the event consolidator",
    ] = None
    dynamo_runtime: Annotated[
        bool,
        Setting("DYN_RUNTIME_ENABLED_KVBM", "--dynamo-runtime"),
        "join Dynamo's runtime, which Dynamo's own variables name, and answer as its endpoint "
        "`DYN_NAMESPACE`.kvbm.controller: status and resets. Nothing else of KVBM needs that runtime",
    ] = False
    weights_version: Annotated[
        str | None,
        Setting("DYN_KVBM_WEIGHTS_VERSION", ours=True, reader="engine"),
        "name of the weights that the engine starts with, for trainers that change weights in memory: engines "
        "with the same files and the same version share blocks, also after a restart",
    ] = None
    traces: Annotated[
        bool,
        Setting("DYN_KVBM_TRACES", ours=True, reader="engine"),
        "send a trace of each request to an OpenTelemetry collector, which `OTEL_EXPORTER_OTLP_ENDPOINT` names; "
        "needs the packages of `openkvbm[otel]`",
    ] = False
    log_level: Annotated[
        str,
        Setting("DYN_LOG", "--log-level", Kind.LOG, choices=LOG_LEVELS, reader="both"),
        "least severe level that is logged",
    ] = "info"

    @property
    def host_on(self) -> bool:
        """Whether there is a host tier."""
        return bool(self.host_blocks or self.host_bytes)

    @property
    def disk_on(self) -> bool:
        """Whether there is a disk tier."""
        return bool(self.disk_blocks or self.disk_bytes)

    @property
    def trusted_peer_uids(self) -> tuple[int, ...]:
        """The users besides ourselves and root that may be at the other end: none, unless the socket was named."""
        return self.peer_uids if self.manager else ()


_HINTS = get_type_hints(Settings, include_extras=True)
SCHEMA: tuple[Setting, ...] = tuple(
    declared(field, _HINTS[field])
    for field in sorted(_HINTS, key=lambda field: field in RemoteSettings.__struct_fields__)
)
"""The settings that are declared above, in that order, and behind them those of the remote tier."""

FIELDS: dict[str, Setting] = {setting.field: setting for setting in SCHEMA}
"""The same by field name."""


def variable(field: str) -> str:
    """The environment variable that sets a field of `Settings`: what an error of the manager names."""
    assert field in FIELDS, f"no setting is called {field}"
    return FIELDS[field].variable
