"""The settings as the rest of the package reads them: checked, in bytes and seconds."""

from __future__ import annotations

import msgspec

from kvbm.settings.places import default_runtime_dir


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, checked. Sizes are bytes, times are seconds.

    `None` for a tier's size means that the tier is off, unless its block count is set, which wins over bytes.
    """

    host_bytes: int | None = None
    host_blocks: int | None = None
    disk_bytes: int | None = None
    disk_blocks: int | None = None
    disk_dir: str = "/tmp/"
    disk_persist: bool = True
    disk_unowned_bytes: int | None = None
    disk_allocator: str = "default"
    disk_zerofill_fallback: bool = False
    disk_o_direct: bool = True
    disk_offload_filter: bool = True
    disk_admission: str | None = None
    disk_write_budget_bytes: int = 0
    disk_write: str = "through"
    disk_io_threads: int = 8
    eviction: str = "gittins"
    onboard: str = "measured"
    onboard_mode: str = "async"
    offload_mode: str = "eager"
    cuda_copy: str = "auto"
    kv_layout: str = "engine"
    numa: bool = True
    staging_bytes: int = 512_000_000
    max_concurrent_transfers: int = 4
    max_transfer_batch_size: int = 16
    offload_min_priority: int = 0
    metrics: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 6880
    manager: str | None = None
    peer_uids: tuple[int, ...] = ()
    runtime_dir: str = msgspec.field(default_factory=default_runtime_dir)
    init_timeout_s: int = 1800
    stats_window_requests: int = 1000
    stats_log_interval_s: int = 5
    consolidator: bool = True
    consolidator_mode: str = "dedup"
    leader_pub_port: int = 56001
    trtllm_events_port: int | None = None
    weights_version: str | None = None
    log_level: str = "info"

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
        """Who besides ourselves and root may be at the other end: nobody, unless the socket was named."""
        return self.peer_uids if self.manager else ()
