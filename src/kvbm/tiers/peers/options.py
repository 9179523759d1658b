"""What a reader of other nodes' memory may use, and how it calls itself."""

from __future__ import annotations

import msgspec

from kvbm.tiers.peers.wire import ASK_BLOCKS_MAX, ASKS_MAX


class PeerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`fleet` and `node` are our own names. `deadline_s`: a load takes so long at most.

    Of each peer at most `known_max` blocks are kept in mind (some 250 bytes each), of `peers_max` peers. `window` loads
    are asked of a peer at once, `pending_limit` of all together. `staging_bytes` of memory are offered to a peer whose
    mover brings blocks.
    """

    fleet: str
    node: str
    deadline_s: float = 2.0
    connect_timeout_s: float = 3.0
    known_max: int = 262_144
    peers_max: int = 64
    pending_limit: int = 64
    window: int = 4
    load_blocks_max: int = 16
    staging_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        assert 0 < self.window <= ASKS_MAX and 0 < self.load_blocks_max <= ASK_BLOCKS_MAX
        assert self.deadline_s > 0 and self.connect_timeout_s > 0 and self.known_max > 0
