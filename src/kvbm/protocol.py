"""The only messages between processes: leader, worker and admin on one side, manager on the other.

A message is a tagged msgpack map; `framing` puts it on a Unix stream socket. File descriptors (the shared memory of a
worker's shard) travel beside a `Welcome`. Nothing is ever unpickled. Block keys travel joined, 32 bytes each.

A *lookup id* is chosen by the leader and names the lease that a lookup took; a *store id* names one reservation.
Both are unique within a leader's session.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from kvbm.layout import BlockLayout, Namespace

PROTOCOL_VERSION = 12
MESSAGE_BYTES_MAX = 8 << 20

KEYS_PER_MESSAGE_MAX = 65_536
"""Blocks of a request beyond this many are neither looked up nor stored in one go."""

STORED_KEYS_MAX = KEYS_PER_MESSAGE_MAX // 2
"""The most keys of one `Reserve`: with a hash for each, it is as long as a `Lookup` may be."""

HELD = -1
"""In `ReserveReply.slots`: the manager holds this block already, or another engine is storing it."""
REFUSED = -2
"""In `ReserveReply.slots`: no slot can be had now; the block is not stored."""

UNLOADED_REASONS = ("cost", "deadline", "no_room", "stale", "refused", "failed", "unused")
"""Why a block that was found is computed all the same: that is faster; the answer or the bytes came too late; host
memory had no room to bring it up; the lease or the session had ended; the tier below refused it or found it damaged; a
rank could not copy it; the engine went on without it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages."""


# ---- leader, worker, admin → manager


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of every session.

    A worker names the namespace and the layout of its blocks; a leader and an admin leave both out. `engine`
    joins a leader with its workers. `request_blocks` is the largest request the engine accepts, in blocks.
    `numa_node` is where the worker's device is attached, and its shard should lie; -1 is anywhere.
    `data_parallel_rank` is the engine's among those that serve one model; a worker says it. `device_blocks` is how many
    blocks the engine's own cache holds, 0 where that is not known; a leader says it. `events`: the engine announces
    what the tiers hold (see `Announce`); a worker says it, as the disk is opened for the first one. `kind` is the
    engine's software, for its name in metrics; empty for vLLM and for programs.

    Of an engine over several nodes a worker says which `ranks` find this manager, and that they are its part number
    `part` of `part_count`; `shard` and the layout's shards are those of this part. `ranks` is empty where all do.
    """

    version: int
    role: str
    engine: str = ""
    rank: int = 0
    rank_count: int = 1
    shard: int = 0
    request_blocks: int = 0
    numa_node: int = -1
    data_parallel_rank: int = 0
    device_blocks: int = 0
    events: bool = False
    kind: str = ""
    ranks: tuple[int, ...] = ()
    part: int = 0
    part_count: int = 1
    namespace: Namespace | None = None
    layout: BlockLayout | None = None


class Lookup(Message, frozen=True, kw_only=True, tag="lookup"):
    """Find the longest run of blocks from `keys[skip]` on, lease it, and bring its blocks below G2 up.

    `keys` is the request's whole chain from its first block; the first `skip` blocks are on the device already.

    The rest is for people who ask why it missed: the engine's id of the `request`, a digest of the `prompt`'s first
    block of tokens, and by name what else shaped its keys (`extras`: adapter, salt, weights; digests of secrets).
    `again`: an earlier answer for this request no longer holds.

    `tenant` is a digest of the request's cache salt, empty without one. `hint` is what its client says of its future
    (`hints.as_mapping`), and `verdicts` what became of each part of that where it was read (`hints.Verdict`).
    """

    lookup: int
    keys: bytes
    skip: int = 0
    request: str = ""
    prompt: bytes = b""
    extras: dict[str, str] = {}
    again: bool = False
    tenant: str = ""
    hint: dict[str, Any] = {}
    verdicts: tuple[tuple[str, str, str, str], ...] = ()


class Says(Message, frozen=True, kw_only=True, tag="says"):
    """A client says something later of the request whose whole chain is `keys`; the rest is as in `Lookup`."""

    keys: bytes
    tenant: str = ""
    hint: dict[str, Any] = {}
    verdicts: tuple[tuple[str, str, str, str], ...] = ()


class Release(Message, frozen=True, kw_only=True, tag="release"):
    """The lease of `lookup` ends. `loaded` blocks from position `first` on reached the device within `seconds`;
    the next `failed` blocks were promised and did not. `unloaded` counts by reason (see `UNLOADED_REASONS`) the blocks
    that were found, that the device lacked, and that are computed all the same: it may come when the lease has ended.
    `answer_s` seconds after the lookup its answer was there, and after `wait_s` its load had ended; 0 is not known.
    `prefill_s` is how long the engine would have computed the blocks that reached the device; 0 where it cannot say.
    """

    lookup: int
    first: int = 0
    loaded: int = 0
    failed: int = 0
    seconds: float = 0.0
    answer_s: float = 0.0
    wait_s: float = 0.0
    unloaded: dict[str, int] = {}
    prefill_s: float = 0.0


class Shorten(Message, frozen=True, kw_only=True, tag="shorten"):
    """The lease of `lookup` keeps its first `blocks` blocks: the managers of the engine's other nodes have no more."""

    lookup: int
    blocks: int


class Reserve(Message, frozen=True, kw_only=True, tag="reserve"):
    """Ask for slots for consecutive blocks of one chain; `parent` is the key before the first, or empty.

    `hashes` is the engine's own hash of each block, 32 bytes each and zeros where it has none of 32 bytes; empty where
    the keys are those hashes. `group` is the blocks' kind of layers, or `groups` has one byte for each. Blocks are
    found by key alone: the keys of different groups must differ (`grouping.in_group`). `again`: for some of them there
    was no room when they were offered before.

    Of blocks that may be announced (see `Announce`) `tokens` has all tokens, 32 bits little-endian each, `before` is
    the engine's own hash of the block before the first, empty where that is its key or there is none, and `facts` has
    an entry for each block, or is empty: what the engine needs besides to announce it. `tenant` is as in `Lookup`.
    """

    store: int
    parent: bytes
    keys: bytes
    hashes: bytes = b""
    group: int = 0
    groups: bytes = b""
    again: bool = False
    tokens: bytes = b""
    before: bytes = b""
    facts: tuple[bytes, ...] = ()
    tenant: str = ""


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    """All ranks wrote the blocks of a reservation; those at positions `failed` (among its slots) they did not.
    The answer to the reservation was there after `answer_s`; 0 is not known."""

    store: int
    failed: tuple[int, ...] = ()
    seconds: float = 0.0
    answer_s: float = 0.0


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """A request that was looked up has ended: `key` is the last of its chain as it was then. Policies learn from it."""

    key: bytes
    output_tokens: int = 0


class Report(Message, frozen=True, kw_only=True, tag="report"):
    """A worker's work, where its engine has no way to tell the leader: the manager hands it on. `stored` has the
    positions of each store that failed and its seconds, `loaded` the seconds of each request's load, which arrived as a
    whole. The same may be told twice."""

    stored: dict[int, tuple[tuple[int, ...], float]] = {}
    loaded: dict[str, float] = {}


class Watch(Message, frozen=True, kw_only=True, tag="watch"):
    """A worker asks for `Progress` of a lookup of its engine."""

    lookup: int


class FenceDone(Message, frozen=True, kw_only=True, tag="fence_done"):
    """A worker will no longer write to slots that were reserved before the fence."""

    fence: int


class CopiesHang(Message, frozen=True, kw_only=True, tag="copies_hang"):
    """A rank has copies that do not end. The manager ends the session; slots that the rank may be writing stay reserved
    until the rank closes it."""


class Reset(Message, frozen=True, kw_only=True, tag="reset"):
    """Drop every block of the engine's namespace that is not in use, unless another engine has that namespace too
    (admin: of all namespaces in any case). `tier` empty means all."""

    tier: str = ""


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """A leader asks for `TierEvents` of its namespace from now on: first of all blocks that the tiers hold, then of
    what comes and goes. Asked again, it begins anew. With `keys` it asks for `HeldBlocks` instead, or beside them."""

    keys: bool = False


class Follow(Message, frozen=True, kw_only=True, tag="follow"):
    """From now on, send `Asked` and `Ended` for every request of every engine."""


class StatusQuery(Message, frozen=True, kw_only=True, tag="status?"):
    """Ask for a `Status`."""


# ---- manager → leader, worker, admin


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The session is accepted. `epoch` names this life of the manager: slots of another epoch mean nothing.

    For a worker two descriptors come along: its shard's arena (`slot_count × slot_bytes`) and the table of slot
    generations (`slot_count` little-endian u64). `lease_s` is how long a lease lasts unless it is released. `events`:
    the manager announces what its tiers hold, so a leader is to say of blocks what that needs (`Reserve.tokens`).
    """

    version: int
    epoch: int
    slot_count: int = 0
    slot_bytes: int = 0
    lease_s: float = 0.0
    tiers: dict[str, int] = {}
    events: bool = False


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The session is not accepted, for this reason (one line)."""

    reason: str


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """To a leader: all ranks of its engine are attached (or, with `ready` false, no longer).

    `missing` has the ranks that were waited for in vain; another `Ready` follows should they come after all.
    `lease_blocks` is the engine's share of host memory, in blocks, for the leases of its requests; 0 is no bound.
    `tiers` has the blocks of each tier that is on, `block.NO_COUNT` where nobody knows how many fit.
    `fingerprint` is that of all nodes of the engine (`Namespace.whole`), and this manager has its part number `part` of
    `part_count`: with several, the leader needs the managers of all.
    """

    ready: bool
    epoch: int
    fingerprint: bytes = b""
    block_bytes: int = 0
    lease_s: float = 0.0
    tiers: dict[str, int] = {}
    missing: tuple[int, ...] = ()
    lease_blocks: int = 0
    part: int = 0
    part_count: int = 1


class LookupReply(Message, frozen=True, kw_only=True, tag="found"):
    """The blocks that a lookup found, from its `skip` on: `slots[i]` of `generations[i]` holds, or will hold, one.

    The first `ready` blocks lie verified in G2; the others are on their way and `Progress` follows. `sources` has
    one byte per block, the tier it was found in. Behind them the run went on: by `no_room` blocks that host memory has
    no room for now, after `refused` ones that the tier below does not give. `arrival_s` is the number of seconds until
    all blocks are expected in G2, behind the reads that were asked for before; 0 where that is not known.

    With several groups the run is all that the engine lacks at `boundary`, in the order of `grouping.Grouping.run`;
    what counts blocks counts those of the prompt. `full` leading blocks of it are held as far as all tokens go.

    `verdicts` is what became of parts of the hint here, as in `Lookup`.
    """

    lookup: int
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    ready: int = 0
    sources: bytes = b""
    no_room: int = 0
    refused: int = 0
    arrival_s: float = 0.0
    boundary: int = 0
    full: int = 0
    verdicts: tuple[tuple[str, str, str, str], ...] = ()


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """`ready` leading blocks of a lookup lie in G2. With `final`, no more will: the rest failed or was dropped.

    `at_s` is when the last one came, on this node's monotonic clock; 0 where more may come, none did, or it is past.
    """

    lookup: int
    ready: int
    final: bool
    at_s: float = 0.0


class ReserveReply(Message, frozen=True, kw_only=True, tag="reserved"):
    """One entry per key: a slot to fill, HELD or REFUSED. `generations` has one entry per slot to fill."""

    store: int
    slots: tuple[int, ...]
    generations: tuple[int, ...] = ()


class Fence(Message, frozen=True, kw_only=True, tag="fence"):
    """To a worker: finish every copy that is under way, never begin one of `stores`, then answer `FenceDone`."""

    fence: int
    stores: tuple[int, ...]


class StoredRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of one chain that came into a tier (see `block.Tier`): the engine's own hash of each, joined,
    and of the block `before` the first, empty where there is none; tokens and facts as in `Reserve`."""

    tier: int
    hashes: bytes
    before: bytes
    tokens: bytes
    facts: tuple[bytes, ...] = ()


class RemovedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that left a tier: the engine's own hash of each, joined."""

    tier: int
    hashes: bytes


class RankReport(Message, frozen=True, kw_only=True, tag="rank_report"):
    """To a leader: what a worker of its engine reported (`Report`), and which rank that worker is."""

    rank: int
    stored: dict[int, tuple[tuple[int, ...], float]] = {}
    loaded: dict[str, float] = {}


class TierEvents(Message, frozen=True, kw_only=True, tag="tier_events"):
    """What has come into the tiers and left them since the last of these messages; `removed` was first. A block is
    `stored` in a tier once, and removed once after that. `complete`: all that the tiers hold has been told."""

    removed: tuple[RemovedBlocks, ...] = ()
    stored: tuple[StoredRun, ...] = ()
    complete: bool = False


class HeldBlocks(Message, frozen=True, kw_only=True, tag="held_blocks"):
    """As `TierEvents`, of all blocks, and only their keys, joined, by tier: for a client that answers from memory what
    is held."""

    removed: dict[int, bytes] = {}
    stored: dict[int, bytes] = {}
    complete: bool = False


class Asked(Message, frozen=True, kw_only=True, tag="asked"):
    """To a session that follows: at `at_s` on the manager's clock, a request was looked up whose chain is `keys`."""

    fingerprint: bytes
    model: str
    block_tokens: int
    keys: bytes
    at_s: float


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """To a session that follows: the request whose chain ended with `key` has ended."""

    fingerprint: bytes
    key: bytes
    output_tokens: int
    at_s: float


class ResetReply(Message, frozen=True, kw_only=True, tag="reset_done"):
    """How many blocks were dropped, how many are in use and stayed, and why dropped ones may return after a crash."""

    dropped: int
    in_use: int
    undone: str = ""


class Status(Message, frozen=True, kw_only=True, tag="status"):
    """Each namespace of the manager: its tiers, and how many blocks are `queued` between host memory and disk. `remote`
    has an entry for each remote tier: what it says of itself, its `fault` and how many blocks are `queued` for it."""

    epoch: int
    spaces: tuple[dict[str, object], ...] = ()


_FromLeader: TypeAlias = Lookup | Says | Release | Shorten | Reserve | Commit | Finished | Reset | Announce
_FromWorker: TypeAlias = Report | Watch | FenceDone | CopiesHang
_ToLeader: TypeAlias = Ready | LookupReply | Progress | ReserveReply | RankReport | TierEvents | HeldBlocks

ToManager: TypeAlias = Hello | _FromLeader | _FromWorker | Follow | StatusQuery
FromManager: TypeAlias = Welcome | Refused | _ToLeader | Fence | Asked | Ended | ResetReply | Status
