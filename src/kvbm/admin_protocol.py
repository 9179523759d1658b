"""The messages of an operator's session: one request, one reply, between a client of role `admin` and the manager.

They use the same socket and frames as `protocol`, after the same `Hello`. `Reset` and `StatusQuery` are there, because
engines send them too. Every reply is bounded: what may be long comes in pages. Fingerprints and block keys are hex
digits here: people read them.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import msgspec

from kvbm import protocol, protocol_decoding
from kvbm.errors import ProtocolError
from kvbm.protocol import Message
from kvbm.remote_report import RemoteReport

PAGE_ROWS_MAX = 1000
"""The most rows of one reply."""


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a namespace: its slots by state, the leased ones and those with a retained block. `fault` is empty
    while it works. Of its cache `salts` that are active so many are `poor`: they hold less than they are sure of; zeros
    where all blocks are one salt's.

    A remote tier has no slots: its `blocks` are 0, as nobody knows how many fit there, and `resident` are those that
    this manager knows of.
    """

    tier: str
    blocks: int
    free: int
    filling: int
    resident: int
    leased: int
    fault: str = ""
    retained: int = 0
    salts: int = 0
    poor: int = 0


class SpaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace of the manager: what it names, its tiers, and the blocks that are under way between them.

    `fields` are the parts of its fingerprint, by name. `staging`: host memory is only the way to disk. `fault` is empty
    unless the whole namespace is off. `onboard_blocks` are queued or being read from disk, `offload_blocks` queued or
    being written to it. `named_sessions` are known of those that clients have named. `remotes` are its remote tiers,
    with queues of their own.
    """

    namespace: str
    fingerprint: str
    model: str
    fields: tuple[tuple[str, str], ...]
    ephemeral: bool
    staging: bool
    block_tokens: int
    block_bytes: int
    tiers: tuple[TierReport, ...]
    fault: str
    onboard_blocks: int
    offload_blocks: int
    leases: int
    reservations: int
    named_sessions: int = 0
    remotes: tuple[RemoteReport, ...] = ()


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `ranks` are attached, of the `rank_count` that find this manager, and `missing` are not; `led`: its
    leader (scheduler) is connected too.

    `leases` and `leased_blocks` are those of its requests now; `lease_blocks_max` is its share of host memory. Its own
    cache holds `device_blocks`, 0 where it did not say.
    """

    engine: str
    model: str
    namespace: str
    rank_count: int
    ranks: tuple[int, ...]
    led: bool
    leases: int
    leased_blocks: int
    lease_blocks_max: int
    device_blocks: int = 0
    missing: tuple[int, ...] = ()


class BlockRow(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that holds a block, or is being filled with it."""

    slot: int
    key: str
    state: str
    leased: bool


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """A lease. `engine` is whose request took it; `ready` of its `blocks` lie in host memory by now."""

    namespace: str
    engine: str
    lease: int
    blocks: int
    ready: int
    ends_in_s: float


Series = tuple[str, tuple[str, ...]]
"""A metric's name and its label values in the table's order; of a histogram, the name ends in `_count` or `_sum`."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """All counters and gauges at `at_s` on the manager's clock."""

    at_s: float
    values: tuple[tuple[str, tuple[str, ...], float], ...] = ()

    def by_series(self) -> dict[Series, float]:
        """The values by name and labels."""
        return {(name, labels): value for name, labels, value in self.values}


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that requests share: they begin with the same block, and `name` is the head of that block's key.

    `tokens` is the length that its last two requests have in common. Of its `requests` so far, `lost` found nothing
    although an earlier one had the same first block. `tiers` has the tokens of it that each tier holds.
    """

    name: str
    namespace: str
    tokens: int
    requests: int
    lost: int
    asked_tokens: int
    found_tokens: int
    heat: float
    tiers: dict[str, int] = {}


# ---- admin → manager


class Describe(Message, frozen=True, kw_only=True, tag="describe?"):
    """Ask for a `Description`."""


class ListBlocks(Message, frozen=True, kw_only=True, tag="blocks?"):
    """Ask for the blocks in one tier (`host` or `disk`, which have slots) of a namespace, from slot `start` on."""

    fingerprint: str
    tier: str
    start: int = 0
    limit: int = 100


class ListLeases(Message, frozen=True, kw_only=True, tag="leases?"):
    """Ask for the leases of all namespaces, after the first `start` of them."""

    start: int = 0
    limit: int = 100


class FindPrefix(Message, frozen=True, kw_only=True, tag="prefix?"):
    """Ask how many blocks of a chain (`keys`, joined) are there, from its first on. It leases nothing."""

    fingerprint: str
    keys: bytes


class Pin(Message, frozen=True, kw_only=True, tag="pin"):
    """Bring a chain's blocks up to host memory, as far as they are held, and keep them there for `seconds`.

    With 0 seconds it is a prefetch: they come when no engine waits for a read, and nothing keeps them once they have
    arrived. A pin of the same chain is replaced.
    """

    fingerprint: str
    keys: bytes
    seconds: float


class Prefetch(Message, frozen=True, kw_only=True, tag="prefetch"):
    """Bring the blocks up to host memory that a session would ask for next. `session` is its client's name, and
    `tenant` a digest of that client's cache salt (`hints.tenant_digest`), empty without one."""

    fingerprint: str
    session: str
    tenant: str = ""


class Unpin(Message, frozen=True, kw_only=True, tag="unpin"):
    """End the pins of the chains whose last keys these are (joined); empty ends all pins of the namespace."""

    fingerprint: str
    last_keys: bytes = b""


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot?"):
    """Ask for a `SnapshotReply`."""


class WhyQuery(Message, frozen=True, kw_only=True, tag="why?"):
    """Ask for a `WhyReply`: about requests whose id is, or begins with, this one; empty is all."""

    request: str = ""
    limit: int = 20


class WhyPrompt(Message, frozen=True, kw_only=True, tag="why_prompt?"):
    """Ask for a `WhyReply` about a chain (`keys`, joined) as if it were a request now. It leases nothing.

    `prompt` is the digest of the first block of tokens, as leaders make it; empty where it is not known.
    """

    fingerprint: str
    keys: bytes
    prompt: bytes = b""


# ---- manager → admin


class TableReport(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the manager: its entries, their greatest number, and the bytes of one."""

    name: str
    count: int
    most: int
    entry_bytes: int


class Description(Message, frozen=True, kw_only=True, tag="description"):
    """The manager as it is now. `fences` are groups of slots that wait until a slow rank writes no more to them;
    `refused` counts the sessions that were refused. Of `asked_blocks` that were looked up since the start, `hit_blocks`
    were found, by tier that this manager has. `events` is where it publishes KV events, `events_replay` where it
    repeats them (empty: nowhere). `tables` take its memory beside the tiers; those of each namespace come apart.
    """

    version: str
    pid: int
    epoch: int
    uptime_s: float
    spaces: tuple[SpaceReport, ...]
    engines: tuple[EngineReport, ...]
    asked_blocks: int
    hit_blocks: dict[str, int]
    sessions: int
    fences: int
    refused: int
    events: str = ""
    events_replay: str = ""
    tables: tuple[TableReport, ...] = ()


class BlockPage(Message, frozen=True, kw_only=True, tag="blocks"):
    """Rows, by slot. `next` is where the next page starts, -1 when there is none. `found` is false where there is no
    such namespace or tier."""

    rows: tuple[BlockRow, ...] = ()
    next: int = -1
    found: bool = True


class LeasePage(Message, frozen=True, kw_only=True, tag="leases"):
    """Rows, in the order in which they were taken; `total` is how many leases there are."""

    rows: tuple[LeaseRow, ...]
    total: int


class PrefixFound(Message, frozen=True, kw_only=True, tag="prefix"):
    """`blocks` leading blocks are in some tier below the device; the first `host` of them in host memory."""

    blocks: int
    host: int


class Pinned(Message, frozen=True, kw_only=True, tag="pinned"):
    """`blocks` leading blocks of the chain are held now or on their way up; `ready` lie in host memory already.

    All pins of the namespace together may hold `blocks_max`, and so many may be on their way by prefetches. `refusal`
    says in one line why nothing was done.
    """

    blocks: int = 0
    ready: int = 0
    blocks_max: int = 0
    refusal: str = ""


class Prefetched(Message, frozen=True, kw_only=True, tag="prefetched"):
    """As `Pinned`, of a session; `asked` is how many blocks are known of it, where it is `known`. What is on its way
    comes when no engine waits for a read."""

    known: bool = False
    asked: int = 0
    blocks: int = 0
    ready: int = 0
    blocks_max: int = 0
    refusal: str = ""


class Unpinned(Message, frozen=True, kw_only=True, tag="unpinned"):
    """The pins that were ended, and how many blocks they held."""

    pins: int
    blocks: int


class SnapshotReply(Message, frozen=True, kw_only=True, tag="snapshot"):
    """All that a live view needs: the manager, its counters now and about a minute ago (or at its start), and the
    prefixes that are asked for most, the hottest first."""

    manager: Description
    now: Moment
    earlier: Moment
    prefixes: tuple[PrefixReport, ...] = ()


class WhyReply(Message, frozen=True, kw_only=True, tag="why"):
    """The newest requests of the `matching` ones, as the manager remembers them since `seconds` ago, at most `kept`.

    `reasons` counts blocks that were computed, of all requests since then; they asked for `asked_blocks`.
    """

    seconds: float
    kept: int
    matching: int
    requests: tuple[dict[str, object], ...]
    reasons: dict[str, int]
    asked_blocks: int


AdminRequest: TypeAlias = (
    Describe | ListBlocks | ListLeases | Snapshot | WhyQuery | WhyPrompt | FindPrefix | Pin | Prefetch | Unpin
)
AdminReply: TypeAlias = (
    Description
    | BlockPage
    | LeasePage
    | SnapshotReply
    | WhyReply
    | PrefixFound
    | Pinned
    | Prefetched
    | Unpinned
)
ToManager: TypeAlias = protocol.ToManager | AdminRequest
FromManager: TypeAlias = protocol.FromManager | AdminReply

_to_manager = msgspec.msgpack.Decoder(ToManager)
_from_manager = msgspec.msgpack.Decoder(FromManager)


def decode_to_manager(body: bytes) -> ToManager:
    """A typed message from any client, or ProtocolError in one line."""
    try:
        return cast(ToManager, _to_manager.decode(body))
    except protocol_decoding.MALFORMED as error:
        raise ProtocolError(f"malformed message of {len(body)} bytes: {error}") from None


def decode_from_manager(body: bytes) -> FromManager:
    """A typed message to an admin, or ProtocolError in one line."""
    try:
        return cast(FromManager, _from_manager.decode(body))
    except protocol_decoding.MALFORMED as error:
        raise ProtocolError(f"malformed message of {len(body)} bytes: {error}") from None
