"""The settings: their names, defaults, variables and flags. The rest of the package is derived from this."""

from __future__ import annotations

from kvbm.settings.parse import BYTES_MAX, LOG_LEVELS
from kvbm.settings.setting import Kind, Setting
from kvbm.settings.values import Settings

PREFIX = "DYN_KVBM_"
PORT_MAX = 65535
CONSOLIDATOR_PORT_OFFSET = 1000
"""The event consolidator listens this far above `leader_pub_port`, as in the original."""


_NO_CONSOLIDATOR = "this build has no event consolidator"

SCHEMA: tuple[Setting, ...] = (
    Setting(
        "host_bytes",
        "DYN_KVBM_CPU_CACHE_GB",
        "--host-memory",
        Kind.SIZE,
        "size of the host tier (G2); 0 is off",
        0,
        BYTES_MAX,
    ),
    Setting(
        "host_blocks",
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS",
        "--host-blocks",
        Kind.COUNT,
        "exact number of host blocks; wins over the size; 0 is no override",
        0,
    ),
    Setting(
        "disk_bytes",
        "DYN_KVBM_DISK_CACHE_GB",
        "--disk",
        Kind.SIZE,
        "size of the disk tier (G3) of one manager; engines with private managers take as much each, and what nobody "
        "owns comes on top (DYN_KVBM_DISK_UNOWNED_GB); 0 is off",
        0,
        BYTES_MAX,
    ),
    Setting(
        "disk_blocks",
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS",
        "--disk-blocks",
        Kind.COUNT,
        "exact number of disk blocks; wins over the size; 0 is no override",
        0,
    ),
    Setting(
        "disk_dir", "DYN_KVBM_DISK_CACHE_DIR", "--disk-dir", Kind.PATH, "directory of the disk tier's files"
    ),
    Setting(
        "disk_persist",
        "DYN_KVBM_DISK_PERSIST",
        "--disk-persist",
        Kind.SWITCH,
        "keep the disk tier's blocks over a restart",
        ours=True,
    ),
    Setting(
        "disk_unowned_bytes",
        "DYN_KVBM_DISK_UNOWNED_GB",
        "--disk-unowned",
        Kind.SIZE,
        "most that directories nobody owns may take in the directory of the disk tier, over all models, those "
        "that were opened, written or closed longest ago going first; unset, eight times the largest tier there, and "
        "what was used within seven days stays beyond that; 0 keeps none",
        0,
        BYTES_MAX,
        ours=True,
    ),
    Setting(
        "disk_allocator",
        "DYN_KVBM_DISK_ALLOCATOR_TYPE",
        "",
        Kind.CHOICE,
        "when O_DIRECT is set on the disk tier's files: after opening, or in the open call",
        choices=("default", "open-direct"),
        no_effect="O_DIRECT is always asked for in the open call",
    ),
    Setting(
        "disk_zerofill_fallback",
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK",
        "--disk-zerofill-fallback",
        Kind.SWITCH,
        "write zeros where the file system has no fallocate",
    ),
    Setting(
        "disk_o_direct",
        "DYN_KVBM_DISK_DISABLE_O_DIRECT",
        "--disk-o-direct",
        Kind.SWITCH,
        "disk I/O past the page cache",
        inverted=True,
    ),
    Setting(
        "disk_offload_filter",
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER",
        "--disk-offload-filter",
        Kind.SWITCH,
        "write a block to disk only when it is offloaded a second time: admission `filter`, else `all`",
        inverted=True,
    ),
    Setting(
        "disk_admission",
        "DYN_KVBM_DISK_ADMISSION",
        "--disk-admission",
        Kind.TEXT,
        "policy that decides what may enter disk: filter, all, ghost (when offered again within twice the tier's "
        "slots), or an installed package's; wins over the switch above, unless that has the higher precedence",
        ours=True,
    ),
    Setting(
        "disk_write_budget_bytes",
        "DYN_KVBM_DISK_WRITE_BUDGET",
        "--disk-write-budget",
        Kind.SIZE,
        "most bytes that are written to disk in 24 hours, over all namespaces, a 24th of them at once; 0 is no bound",
        0,
        BYTES_MAX,
        ours=True,
    ),
    Setting(
        "disk_write",
        "DYN_KVBM_DISK_WRITE",
        "--disk-write",
        Kind.CHOICE,
        "when a block is offered to disk: once host memory has it and on each hit, or only when host memory is about "
        "to give it up (fewer writes; a manager that is killed loses what it had not written)",
        choices=("through", "eviction"),
        ours=True,
    ),
    Setting(
        "disk_io_threads",
        "DYN_KVBM_DISK_IO_THREADS",
        "--disk-io-threads",
        Kind.COUNT,
        "threads that read and write the disk tier",
        1,
        256,
        ours=True,
    ),
    Setting(
        "eviction",
        "DYN_KVBM_EVICTION",
        "--eviction",
        Kind.TEXT,
        "policy that decides what a full tier gives up: gittins, lru, s3fifo, sieve, arc, tinylfu, gdsf, or one that "
        "an installed package brings",
        ours=True,
    ),
    Setting(
        "onboard",
        "DYN_KVBM_ONBOARD",
        "",
        Kind.CHOICE,
        "when a hit is loaded: while it is measured to be faster than computing it, or always (for tests)",
        choices=("measured", "always"),
        ours=True,
        reader="engine",
    ),
    Setting(
        "onboard_mode",
        "DYN_KVBM_ONBOARD_MODE",
        "",
        Kind.CHOICE,
        "load a hit before its request is scheduled, or, where some of the prompt must be computed anyway and all of "
        "the hit lies in host memory, beside that forward pass, each layer ahead of its use (CUDA graphs then become "
        "piecewise; needs kv_load_failure_policy=fail, or Model Runner V1 without asynchronous scheduling)",
        choices=("async", "layerwise"),
        ours=True,
        reader="engine",
    ),
    Setting(
        "offload_mode",
        "DYN_KVBM_OFFLOAD_MODE",
        "",
        Kind.CHOICE,
        "store a block when it is full, or only when the engine is about to hand out its device memory (fewer copies; "
        "an engine that is killed loses what it had not handed out)",
        choices=("eager", "lazy"),
        ours=True,
        reader="engine",
    ),
    Setting(
        "cuda_copy",
        "DYN_KVBM_CUDA_COPY",
        "",
        Kind.CHOICE,
        "how blocks are copied on CUDA: what was measured to be fastest at start, or by batches of the copy engines, "
        "rows, single pieces, or a kernel",
        choices=("auto", "batch", "rows", "each", "kernel"),
        ours=True,
        reader="engine",
    ),
    Setting(
        "kv_layout",
        "DYN_KVBM_KV_LAYOUT",
        "",
        Kind.CHOICE,
        "leave the layout of the KV cache to the engine, or ask it to keep all layers of a block side by side, where "
        "its attention can read that (vLLM from 0.29 on)",
        choices=("engine", "block"),
        ours=True,
        reader="engine",
    ),
    Setting(
        "numa",
        "DYN_MEMORY_DISABLE_NUMA",
        "",
        Kind.SWITCH,
        "place each rank's host memory next to its GPU",
        inverted=True,
        reader="engine",
    ),
    Setting(
        "staging_bytes",
        "DYN_KVBM_DISK_STAGING_GB",
        "--disk-staging",
        Kind.SIZE,
        "host memory that blocks pass through when there is a disk tier and no host tier",
        1,
        BYTES_MAX,
        ours=True,
    ),
    Setting(
        "max_concurrent_transfers",
        "DYN_KVBM_MAX_CONCURRENT_TRANSFERS",
        "--max-concurrent-transfers",
        Kind.COUNT,
        "batches on their way from host to disk at one time; only its product with the batch size counts, 48 at most",
        1,
        4096,
    ),
    Setting(
        "max_transfer_batch_size",
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE",
        "--max-transfer-batch-size",
        Kind.COUNT,
        "blocks in one batch from host to disk; see above",
        1,
        65536,
    ),
    Setting(
        "offload_min_priority",
        "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
        "",
        Kind.COUNT,
        "stop offloading a request at its first block of a lower retention priority (TensorRT-LLM)",
        0,
        100,
        no_effect="no engine hands us retention priorities",
    ),
    Setting("metrics", "DYN_KVBM_METRICS", "--metrics", Kind.SWITCH, "serve /metrics over HTTP"),
    Setting(
        "metrics_host",
        "DYN_KVBM_METRICS_HOST",
        "--metrics-host",
        Kind.TEXT,
        "address that /metrics listens on; 0.0.0.0 lets other machines scrape it",
        ours=True,
    ),
    Setting(
        "metrics_port",
        "DYN_KVBM_METRICS_PORT",
        "--metrics-port",
        Kind.PORT,
        "port of /metrics; an engine's own manager takes the next free one",
        1,
        PORT_MAX,
    ),
    Setting(
        "manager",
        "DYN_KVBM_MANAGER",
        "--socket",
        Kind.SOCKET,
        "socket of a shared manager; unset, an engine starts a private one",
        ours=True,
        reader="both",
    ),
    Setting(
        "peer_uids",
        "DYN_KVBM_PEER_UIDS",
        "--peer-uids",
        Kind.USERS,
        "user ids besides one's own and root's that may be at the other end of an explicitly named socket, as between "
        "containers; to be set at both ends",
        ours=True,
        reader="both",
    ),
    Setting(
        "runtime_dir",
        "DYN_KVBM_RUNTIME_DIR",
        "--runtime-dir",
        Kind.PATH,
        "directory of sockets and locks",
        ours=True,
        reader="both",
    ),
    Setting(
        "init_timeout_s",
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS",
        "",
        Kind.SECONDS,
        "how long start-up may take before it is given up",
        reader="engine",
    ),
    Setting(
        "stats_window_requests",
        "DYN_KVBM_CACHE_STATS_MAX_REQUESTS",
        "",
        Kind.COUNT,
        "requests that the hit rates are taken over",
        1,
        10_000_000,
    ),
    Setting(
        "stats_log_interval_s",
        "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS",
        "",
        Kind.SECONDS,
        "least time between two lines of hit rates in the log",
        0,
    ),
    Setting(
        "consolidator",
        "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR",
        "",
        Kind.SWITCH,
        "merge the engine's KV events with ours",
        no_effect=_NO_CONSOLIDATOR,
    ),
    Setting(
        "consolidator_mode",
        "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE",
        "",
        Kind.CHOICE,
        "one event per block over all tiers, or every event with its tier",
        choices=("dedup", "passthrough"),
        no_effect=_NO_CONSOLIDATOR,
    ),
    Setting(
        "leader_pub_port",
        "DYN_KVBM_LEADER_ZMQ_PUB_PORT",
        "",
        Kind.PORT,
        "base port: the consolidator listens 1000 above it",
        1,
        PORT_MAX - CONSOLIDATOR_PORT_OFFSET,
        no_effect=_NO_CONSOLIDATOR,
    ),
    Setting(
        "trtllm_events_port",
        "DYN_KVBM_TRTLLM_ZMQ_PORT",
        "",
        Kind.PORT,
        "port on which TensorRT-LLM publishes its KV events",
        1,
        PORT_MAX,
        no_effect=_NO_CONSOLIDATOR,
    ),
    Setting(
        "weights_version",
        "DYN_KVBM_WEIGHTS_VERSION",
        "",
        Kind.TEXT,
        "what a trainer calls the weights that the engine begins with, where it may change them in memory: engines of "
        "the same files and version share blocks, over restarts too",
        ours=True,
        reader="engine",
    ),
    Setting(
        "log_level",
        "DYN_LOG",
        "--log-level",
        Kind.LOG,
        "least severe level that is logged",
        choices=LOG_LEVELS,
        reader="both",
    ),
)
"""One row per field of `Settings`, in its order."""

FILE_VARIABLE = "DYN_KVBM_CONFIG"
"""The variable that names the settings file (ours)."""

FIELDS: dict[str, Setting] = {setting.field: setting for setting in SCHEMA}
"""The schema by field name."""

assert tuple(FIELDS) == Settings.__struct_fields__, "the schema has one row per field, in the same order"


def variable(field: str) -> str:
    """The environment variable that sets a field of `Settings`: what an error of the manager names."""
    assert field in FIELDS, f"no setting is called {field}"
    return FIELDS[field].variable
