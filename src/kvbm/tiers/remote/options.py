"""What can be chosen about a remote tier."""

from __future__ import annotations

import msgspec


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """See `blob_tier.open_blob_tier`. Times in seconds."""

    load_threads: int = 8
    store_threads: int = 2
    pending_limit: int = 64
    """Loads and stores together; stores are at most two for each of their threads, so loads always find room."""
    load_deadline_s: float = 2.0
    store_deadline_s: float = 60.0
    poll_s: float = 5.0
    """How often the other nodes' logs are listed while anything changes or is loaded."""
    poll_max_s: float = 60.0
    """How often at least."""
    scan_threads: int = 4
    """So many packs' ends are read at once when all packs are listed."""
    catalogue_blocks: int = 1 << 20
    """Of so many blocks a node remembers where they lie: about 100 bytes each."""
    collect: bool = True
    """Whether this node takes its turns in removing packs."""
    ttl_s: float = 7 * 86400.0
    """Packs that nobody used for so long are removed."""
    capacity_bytes: int | None = None
    """All packs of the store together shall not take more: the least recently used are removed. None: no bound."""
    collect_period_s: float = 1800.0

    @property
    def touch_period_s(self) -> float:
        """The store is told of a pack's use so often at most: three times that may fail, and it stays."""
        return self.ttl_s / 4

    def __post_init__(self) -> None:
        for name in ("load_threads", "store_threads", "pending_limit", "scan_threads", "catalogue_blocks"):
            assert getattr(self, name) > 0, f"{name} is at least 1"
        deadlines = ("load_deadline_s", "store_deadline_s")
        for name in (*deadlines, "poll_s", "ttl_s", "collect_period_s"):
            assert getattr(self, name) > 0.0, f"{name} is above 0"
        assert self.poll_max_s >= self.poll_s
