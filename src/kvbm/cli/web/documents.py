"""What the admin API takes and answers, as types: the OpenAPI document, the checks and the replies come from them.

The replies have the fields that the commands print with `--json`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvbm.admin_protocol import PAGE_ROWS_MAX, BlockRow, LeaseRow, SpaceReport
from kvbm.cli.pin import HOURS_MAX
from kvbm.cli.prompts import TOKEN_MAX
from kvbm.cli.status import ManagerStatus
from kvbm.hints import NAME_CHARACTERS_MAX
from kvbm.observe.view import View
from kvbm.protocol import ResetReply

START_MAX = 1 << 40
TOKENS_MAX = 1 << 20
BYTES_MAX = 1 << 50
REQUESTS_MAX = 256

Start = Annotated[int, Meta(ge=0, le=START_MAX, description="Where the page starts.")]
Limit = Annotated[int, Meta(ge=1, le=PAGE_ROWS_MAX, description="The most rows.")]
Namespace = Annotated[
    str, Meta(max_length=64, description="The namespace's first digits, where there are several.")
]
Model = Annotated[
    str, Meta(max_length=4096, description="The model, as its engine names it; needed among several.")
]
Tokens = Annotated[
    list[Annotated[int, Meta(ge=0, le=TOKEN_MAX)]],
    Meta(min_length=1, max_length=TOKENS_MAX, description="The prompt's token ids."),
]


class Given(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller gives. A name that is not known is refused: it would be a mistake without a word."""


class Nothing(Given, frozen=True, kw_only=True):
    """No parameter."""


class TopParameters(Given, frozen=True, kw_only=True):
    """Over which time."""

    since_start: Annotated[
        bool, Meta(description="Count from the manager's start, not over the last minute.")
    ] = False
    live: Annotated[
        bool, Meta(description="Flows and evictions over the last seconds, as on a live screen.")
    ] = False


class WhyParameters(Given, frozen=True, kw_only=True):
    """Which requests."""

    request: Annotated[
        str,
        Meta(max_length=512, description="Id of one request, or its first characters; empty is the latest."),
    ] = ""
    limit: Annotated[int, Meta(ge=1, le=REQUESTS_MAX, description="The most requests.")] = 20


class BlocksParameters(Given, frozen=True, kw_only=True):
    """Which blocks."""

    tier: Annotated[Literal["G2", "G3"], Meta(description="Host memory or disk.")] = "G2"
    namespace: Namespace = ""
    start: Start = 0
    limit: Limit = 50


class PageParameters(Given, frozen=True, kw_only=True):
    """Which page."""

    start: Start = 0
    limit: Limit = 50


class ResetBody(Given, frozen=True, kw_only=True):
    """What to drop: host memory, disk, or both."""

    tier: Literal["G2", "G3", "all"]


class PromptBody(Given, frozen=True, kw_only=True):
    """A prompt."""

    tokens: Tokens
    namespace: Namespace = ""
    model: Model = ""


class PrefetchBody(Given, frozen=True, kw_only=True):
    """A prompt, by its `tokens`, or what a `session` asked for last: one of the two. `salt` is the cache salt of that
    session's requests."""

    tokens: Tokens | UnsetType = UNSET
    session: Annotated[
        str, Meta(max_length=NAME_CHARACTERS_MAX, description="Its client's name for the session.")
    ] = ""
    salt: Annotated[str, Meta(max_length=4096, description="The session's cache salt.")] = ""
    namespace: Namespace = ""
    model: Model = ""


class PinBody(PromptBody, frozen=True, kw_only=True):
    """A prompt, and how long to keep it: at most a week."""

    hours: Annotated[float, Meta(gt=0, le=HOURS_MAX)] = 1.0


class UnpinAllBody(Given, frozen=True, kw_only=True):
    """A namespace."""

    namespace: Namespace = ""
    model: Model = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The manager, and what of it does not work, a line each."""

    managers: tuple[ManagerStatus, ...]


class Top(View, frozen=True, kw_only=True):
    """What `kvbm top` shows. `findings` say whether it works, whether it is worth it, and what would help."""

    socket: str


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """How and when the first missing block left a tier."""

    what: str
    seconds_ago: float


class RequestFound(msgspec.Struct, frozen=True, kw_only=True):
    """How far a request matched: blocks found on the `device`, in `host` memory, on `disk` and in a `remote` store, and
    `loaded`.

    `missing` and `unloaded` count blocks that were computed, by reason; `reason` is the one that cost the most, and
    `advice` what would help. Of a prompt, `prefix` has the blocks of its beginning in each tier.
    """

    request: str
    seconds_ago: float
    model: str
    namespace: str
    block_tokens: int
    blocks: int
    device: int
    host: int
    disk: int
    remote: int
    no_room: int
    first_missing: int | None
    missing: dict[str, int]
    left: dict[str, Left]
    differs: list[str]
    loaded: int
    unloaded: dict[str, int]
    unneeded: int
    lookups: int
    eviction_policy: str
    tiers: list[str]
    history_complete: bool
    hint: list[str]
    reason: str
    advice: list[str]
    prefix: dict[str, int] | UnsetType = UNSET


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """How far the latest requests matched, and why no further. `reasons` counts blocks over all requests of the last
    `seconds`."""

    seconds: float
    requests_kept: int
    asked_blocks: int
    reasons: dict[str, int]
    requests: list[RequestFound]


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the blocks in one tier. `next` is where the next page starts, -1 when there is none."""

    namespace: str
    tier: str
    blocks: tuple[BlockRow, ...]
    next: int


class Leases(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the leases. `next` is where the next page starts, -1 when there is none."""

    leases: tuple[LeaseRow, ...]
    total: int
    next: int


class Namespaces(msgspec.Struct, frozen=True, kw_only=True):
    """The namespaces, with the parts that engines must agree on before they share blocks."""

    namespaces: tuple[SpaceReport, ...]


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is under way in a namespace: blocks from disk to host memory and back, from remote stores and back, and
    stores of engines."""

    namespace: str
    onboard_blocks: int
    offload_blocks: int
    remote_onboard_blocks: int
    remote_offload_blocks: int
    reservations: int


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """What is under way. `fences` are groups of slots that wait until a slow rank writes no more to them."""

    queues: tuple[QueueRow, ...]
    fences: int


class ResetDone(msgspec.Struct, frozen=True, kw_only=True):
    """What was dropped, by tier. Blocks in use stay."""

    manager: str
    tiers: dict[str, ResetReply]


class PinDone(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompt's `blocks`, `pinned` are held for `seconds`; `ready` lie in host memory already."""

    pinned: int
    ready: int
    blocks: int
    seconds: float


class PrefetchDone(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompt's or session's `blocks`, `coming` are on their way from disk, and `ready` were in host memory. A
    session that is not known has none."""

    coming: int
    ready: int
    blocks: int


class UnpinDone(msgspec.Struct, frozen=True, kw_only=True):
    """The pins that were ended, and how many blocks they held."""

    pins: int
    blocks: int


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Why it was not done, in one line."""

    error: str
