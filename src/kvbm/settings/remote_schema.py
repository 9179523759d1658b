"""The settings of the remote tier (G4): the store, also by the original's variables for it, and what is done there."""

from __future__ import annotations

from typing import Annotated

from kvbm.settings.fleet_schema import FleetSettings
from kvbm.settings.setting import Kind, Setting

HOUR_MAX = 10_000_000


class RemoteSettings(FleetSettings, frozen=True, kw_only=True):
    """The part of `Settings` that is about stores beyond this machine."""

    remote: Annotated[
        str | None,
        Setting("DYN_KVBM_REMOTE", "--remote", Kind.STORE, metavar="URL", ours=True),
        "store that many managers share (G4): s3://bucket/prefix?region=…&endpoint=…, gs://bucket/prefix, "
        "az://container/prefix?account=…, redis://host:port/db (rediss, valkey, valkeys), "
        "mooncake://master:port?index=URL, or file:///path of a shared directory. Credentials are found as "
        "each cloud's own tools find them. Unset is off",
    ] = None
    object_enabled: Annotated[
        bool,
        Setting("DYN_KVBM_OBJECT_ENABLED"),
        "use the bucket that DYN_KVBM_OBJECT_BUCKET names, as the original announced it; DYN_KVBM_REMOTE wins",
    ] = False
    object_bucket: Annotated[
        str | None,
        Setting("DYN_KVBM_OBJECT_BUCKET", needs="object"),
        "bucket of S3; `{worker_id}` in it becomes 0, because the parts of all ranks lie together here",
    ] = None
    object_endpoint: Annotated[
        str | None,
        Setting("DYN_KVBM_OBJECT_ENDPOINT", needs="object"),
        "address of a store that speaks S3: https://host:port",
    ] = None
    object_region: Annotated[
        str | None,
        Setting("DYN_KVBM_OBJECT_REGION", needs="object"),
        "region of the bucket",
    ] = None
    object_access_key: Annotated[
        str | None,
        Setting("DYN_KVBM_OBJECT_ACCESS_KEY", kind=Kind.SECRET, needs="remote"),
        "access key of the store (the user, of Redis), where its own way of finding credentials shall not count",
    ] = None
    object_secret_key: Annotated[
        str | None,
        Setting("DYN_KVBM_OBJECT_SECRET_KEY", kind=Kind.SECRET, needs="remote"),
        "secret key that belongs to it (the password, of Redis)",
    ] = None
    remote_known_blocks: Annotated[
        int,
        Setting("DYN_KVBM_OBJECT_NUM_BLOCKS", "--remote-known-blocks", minimum=1, needs="remote"),
        "of so many blocks a manager remembers where they lie in the store, about 100 bytes each",
    ] = 1 << 20
    remote_write: Annotated[
        bool,
        Setting("DYN_KVBM_REMOTE_WRITE", "--remote-write", ours=True, needs="remote"),
        "write blocks to the store; off, this manager only reads what others wrote",
    ] = True
    remote_admission: Annotated[
        str,
        Setting("DYN_KVBM_REMOTE_ADMISSION", "--remote-admission", metavar="NAME", ours=True, needs="remote"),
        "which blocks are written to the store: `all`, `filter` (those that are asked for again), `ghost`, or the "
        "name of an installed policy",
    ] = "all"
    remote_linger_s: Annotated[
        int,
        Setting(
            "DYN_KVBM_REMOTE_LINGER_SECS",
            "--remote-linger",
            Kind.SECONDS,
            maximum=3600,
            ours=True,
            needs="remote",
        ),
        "how long a block waits for the next ones of its chain, with which it is written together",
    ] = 10
    remote_deadline_ms: Annotated[
        int,
        Setting(
            "DYN_KVBM_REMOTE_DEADLINE_MS",
            "--remote-deadline",
            minimum=10,
            maximum=600_000,
            ours=True,
            needs="beyond",
        ),
        "a read from a store or from another node that takes longer, in milliseconds, is given up: its blocks are "
        "computed",
    ] = 2000
    remote_ttl_hours: Annotated[
        int,
        Setting(
            "DYN_KVBM_REMOTE_TTL_HOURS",
            "--remote-ttl",
            minimum=1,
            maximum=HOUR_MAX,
            ours=True,
            needs="remote",
        ),
        "blocks in the store that nobody used for so many hours are removed",
    ] = 168
    remote_bytes: Annotated[
        int | None,
        Setting("DYN_KVBM_REMOTE_GB", "--remote-size", Kind.SIZE, ours=True, needs="remote"),
        "limit for all that lies in the store; the least recently used goes first. Unset is no limit but the time",
    ] = None
    remote_collect: Annotated[
        bool,
        Setting("DYN_KVBM_REMOTE_COLLECT", "--remote-collect", ours=True, needs="remote"),
        "whether this manager takes its turns in removing what is too old or too much; several may",
    ] = True
    remote_write_bytes: Annotated[
        int,
        Setting("DYN_KVBM_REMOTE_WRITE_GB", "--remote-write-budget", Kind.SIZE, ours=True, needs="remote"),
        "limit for what is written to the store in an hour; 0 is none",
    ] = 0
    remote_requests: Annotated[
        int,
        Setting(
            "DYN_KVBM_REMOTE_WRITES_PER_HOUR", "--remote-writes", maximum=HOUR_MAX, ours=True, needs="remote"
        ),
        "limit for the number of writes to the store in an hour; 0 is none",
    ] = 0
    remote_key_file: Annotated[
        str | None,
        Setting(
            "DYN_KVBM_REMOTE_KEY_FILE",
            "--remote-key-file",
            Kind.PATH,
            metavar="FILE",
            ours=True,
            needs="remote",
        ),
        "encrypt what is written to the store with keys derived from these, one for each tenant (`cache_salt`): lines "
        "of `name:base64 of 32 bytes`; the first encrypts, all decrypt",
    ] = None
    remote_key_command: Annotated[
        str | None,
        Setting(
            "DYN_KVBM_REMOTE_KEY_COMMAND",
            "--remote-key-command",
            Kind.SECRET,
            metavar="COMMAND",
            ours=True,
            needs="remote",
        ),
        "program, with its arguments, that prints such lines; no shell reads it, and it is not shown",
    ] = None

    node_managers: Annotated[
        str | None,
        Setting("DYN_KVBM_NODE_MANAGERS", metavar="ADDRESSES", ours=True, reader="engine"),
        "managers of the engine's other nodes, for its scheduler, separated by commas: tcp://10.0.0.8:7401, where they "
        "listen (DYN_KVBM_NODE_LISTEN), or a socket that forwards there. The ranks of each node find its own manager "
        "by themselves",
    ] = None
    node_listen: Annotated[
        str | None,
        Setting("DYN_KVBM_NODE_LISTEN", "--node-listen", Kind.ADDRESS, metavar="ADDRESS", ours=True),
        "address where schedulers on other nodes reach this manager, for engines with ranks on several: 10.0.0.8:7401",
    ] = None

    @property
    def object_on(self) -> bool:
        """Whether the original's variables name a store."""
        return bool(self.object_enabled and self.object_bucket)

    @property
    def remote_on(self) -> bool:
        """Whether there is a store."""
        return bool(self.remote) or self.object_on

    @property
    def beyond_on(self) -> bool:
        """Whether blocks can come from beyond this node: from a store, or from other nodes' memory."""
        return self.remote_on or bool(self.fleet)
