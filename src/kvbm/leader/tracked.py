"""A request as the leader sees it: the engine's calls about it, the answers, and the leader's own notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvbm.block import KEY_BYTES
from kvbm.framing import FACTS_BYTES_MAX
from kvbm.hashing import derive_key, join_keys, keys_in_space, space_mask
from kvbm.hints import UNHINTED, ClientHint, Verdict
from kvbm.leader.retry import Retry


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks after the computed ones can be loaded. With `later`, the engine should ask again.

    With `layerwise` the request may be computed in the same step that loads them.
    """

    blocks: int = 0
    later: bool = False
    layerwise: bool = False


ASK_AGAIN = Answer(later=True)


class StateOffer(NamedTuple):
    """A recurrent state of a group, for the first `boundary` blocks of a request: it lies in this device block until
    the step after the next."""

    group: int
    device_block: int
    boundary: int


class Scheduled(NamedTuple):
    """A request in an engine step: how many of its leading blocks are complete after it, and its block table.

    The table is only asked for when it is needed. With several groups `tables` has that of each, and `states` the
    recurrent states that the step leaves behind. `computed_tokens` were on the device before the step.
    """

    request: str
    complete_blocks: int
    device_blocks: Callable[[], Sequence[int]]
    tables: Callable[[], Sequence[Sequence[int]]] = lambda: ()
    states: tuple[StateOffer, ...] = ()
    computed_tokens: int = 0


class Told(NamedTuple):
    """What people are told of a request that misses: as in `Lookup`. Nothing depends on it."""

    prompt: bytes = b""
    extras: tuple[tuple[str, str], ...] = ()


NOTHING_TOLD = Told()


def readable(text: str) -> str:
    """The text as a message can carry it: halves of surrogate pairs, which JSON can bring, are question marks."""
    return text.encode(errors="replace").decode()


Keep = Callable[[float], bool]
"""Whether blocks of a request may be kept, by a look at what shapes them that is not older than this time (seconds)."""


class Named(NamedTuple):
    """Blocks by their keys, joined; `hashes` is as in `Reserve`."""

    keys: bytes
    hashes: bytes


class Said(NamedTuple):
    """What is announced of blocks beside their hashes: tokens, `before` and facts as in `Reserve`."""

    tokens: bytes = b""
    before: bytes = b""
    facts: tuple[bytes, ...] = ()


NOTHING_SAID = Said()
Says = Callable[[int, int], Said]
"""What is said of a request's blocks from this number up to that one; `before` is left out."""


@dataclass(slots=True)
class Tracked:
    """One request of the engine, as far as the leader follows it."""

    hashes: Sequence[bytes]
    extras: bytes | None
    """None: it cannot be named yet, and is neither looked up nor stored."""
    keep: Keep | None = None
    told: Told = NOTHING_TOLD
    says: Says | None = None
    asker: ClientHint = UNHINTED
    stored: int = 0
    quiet_tokens: int = 0
    """So many tokens more are computed before it has offers again (`has_offers`), unless something happens before."""
    retry: Retry = field(default_factory=Retry)
    refused_at: int = -1
    computed: int = 0
    layerwise: bool = False
    asked_from: int | None = None
    on_device: int = 0
    """How many of its first blocks were on the device when it last began to wait for its lookup."""
    asked_blocks: int = 0
    begun: bool = False
    load_failed: bool = False
    """It is computed: vLLM keeps room for all of it, and two such requests that load again may wait for each other's
    room for ever."""
    outdated: bool = False
    """It is computed from KV that must not be stored under the present keys: none of its blocks is stored."""
    reach: int | None = None
    """Lookups ask for no more than so many blocks: the engine computes the others in any case. None: for all."""
    tails: set[int] = field(default_factory=set)
    """With several groups: the boundaries at which it, or another request, may be taken up again, and for which nothing
    was offered yet."""
    tails_offered: set[int] = field(default_factory=set)
    heard: tuple[Verdict, ...] = ()
    """What became of parts of its client's hint at the manager."""

    @property
    def stores(self) -> bool:
        """Whether blocks of it may be offered now."""
        return not self.outdated and self.extras is not None and self.asker.hint.store

    def has_offers(self, complete_blocks: int) -> bool:
        """Whether the leader is to be told of a step that leaves so many blocks complete; of most steps it is not."""
        more = complete_blocks > self.stored or bool(self.tails)
        return not self.begun or (more and self.stores)

    def said(self, start: int, end: int, before: bytes) -> Said:
        """What is said of these blocks, behind the one that the engine calls `before`; nothing without events, and
        where it would be too long."""
        said = self.says(start, end) if self.says is not None else NOTHING_SAID
        too_long = max(map(len, said.facts), default=0) > FACTS_BYTES_MAX
        return said._replace(before=before) if said.tokens and not too_long else NOTHING_SAID

    @property
    def wanted(self) -> int:
        """How many of its first blocks lookups ask for."""
        return len(self.hashes) if self.reach is None else min(self.reach, len(self.hashes))

    def ends_before(self, tail: int, step: int) -> None:
        """With several groups: what lies behind the first `tail` blocks must be computed in any case. Where the same
        prompt comes again, it is taken up at the last boundary before that, a multiple of `step`."""
        if self.reach != tail:
            self.reach = tail
            self.wants_tail(tail - tail % step)

    def wants_tail(self, boundary: int) -> None:
        """It, or another request, may be taken up again at this boundary."""
        if boundary not in self.tails_offered:
            self.tails.add(boundary)
            self.quiet_tokens = 0

    def tail_offered(self, boundary: int) -> None:
        """What the boundary needs was offered, or is gone."""
        self.tails.discard(boundary)
        self.tails_offered.add(boundary)

    def tail_refused(self, boundary: int, now_s: float) -> None:
        """The manager had no slot for it, or not what lies before it: it is offered again while the engine has it."""
        self.tails_offered.discard(boundary)
        self.tails.add(boundary)
        self.quiet_tokens = 0
        if now_s >= self.retry.due_s:
            self.retry.failed(now_s)

    def preempted(self, loads: bool) -> None:
        """The engine took its blocks, and will run it anew. It is looked up in turn again. After a reset it may have
        come back within this very step, and load (`loads`)."""
        self.asked_from, self.begun, self.load_failed = None, loads, False
        self.offer_anew()

    def keys_changed(self) -> None:
        """Blocks have other keys now. A running request is computed from older KV: it is not stored until the engine
        computes it anew."""
        self.asked_from, self.outdated = None, self.begun
        self.offer_anew()

    def offer_anew(self) -> None:
        """Nothing of it counts as stored any more."""
        self.stored, self.refused_at, self.retry, self.quiet_tokens = 0, -1, Retry(), 0
        self.tails |= self.tails_offered
        self.tails_offered.clear()

    def refused(self, block: int, now_s: float) -> None:
        """The manager had no slot for the block of this number, nor for those after it: they are offered again.

        It also refuses blocks whose parent it does not hold, and the parent may have gone since. So each refusal in a
        row reaches twice as far back; what the manager holds it only says so.
        """
        if now_s >= self.retry.due_s:  # else an answer to what was offered before the last refusal came
            if block > self.refused_at:
                self.retry.succeeded()
            self.refused_at = block
            self.retry.failed(now_s)
            block = max(0, block + 1 - (1 << (self.retry.failures - 1)))
        self.stored, self.quiet_tokens = min(self.stored, block), 0

    def named(self, start: int, end: int, fingerprint: bytes, extras: bytes) -> Named:
        """The keys of the blocks from number `start` up to `end`, as far as the engine has hashed them.

        The manager keeps namespaces apart. So the engine's own hash is the key where there are no `extras`, which the
        hash does not cover; with extras it is moved to their key space. Nothing is kept: a request has thousands of
        keys, and a step needs those of its newest blocks.
        """
        hashes = self.hashes[start:end]
        joined = b"".join(hashes)
        if len(joined) == KEY_BYTES * len(hashes) and _of_key_length(self.hashes, hashes):
            if not extras:
                return Named(joined, b"")
            return Named(keys_in_space(joined, space_mask(fingerprint, extras)), joined)
        return _derived(hashes, fingerprint, extras)


def _of_key_length(source: Sequence[bytes], hashes: Sequence[bytes]) -> bool:
    """Whether all of these hashes of `source` are as long as keys; looked at one by one unless the source knows."""
    return getattr(source, "of_key_length", False) or set(map(len, hashes)) <= {KEY_BYTES}


def _derived(hashes: Sequence[bytes], fingerprint: bytes, extras: bytes) -> Named:
    """The keys of blocks of which an engine has hashes of another length than keys."""
    keys: list[bytes] = []
    told: list[bytes] = []
    for block_hash in hashes:
        whole = len(block_hash) == KEY_BYTES
        told.append(block_hash if whole else bytes(KEY_BYTES))
        if not whole:
            keys.append(derive_key(fingerprint, block_hash, extras))
        elif extras:
            keys.append(keys_in_space(block_hash, space_mask(fingerprint, extras)))
        else:
            keys.append(block_hash)
    return Named(join_keys(keys), join_keys(told))
