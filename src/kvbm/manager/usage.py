"""What the policies still have to learn: requests, their ends, and blocks to be offered to the tiers below.

They learn it after the answers, in slices: telling them takes longer than the answers do, and the next request must
not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from kvbm.block import BlockKey, Tier
from kvbm.clock import Clock
from kvbm.manager.downward import Downward
from kvbm.manager.pool import SlotPool
from kvbm.policy.contract import ClientWord, tell_hint

OFFERED_AT_ONCE = 512
"""Blocks offered to the tiers below in one slice, which takes about a millisecond where all of them are admitted."""
PENDING_KEYS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class _Requested:
    """A request came for this chain; its first `found` blocks were in a tier or on the device. It wants `tails` too,
    the first of which was found behind them where `taken_up`. Its client says `word`. It is the `tenant`'s, None where
    nobody knows whose it is. Host memory did not have those that were `brought` for it: they may have come since."""

    keys: list[BlockKey]
    found: int
    tails: Sequence[list[BlockKey]] = ()
    taken_up: bool = False
    word: ClientWord | None = None
    tenant: str | None = None
    brought: Set[BlockKey] = frozenset()


@dataclass(frozen=True, slots=True)
class _Stored:
    """These blocks, each behind its parent, came into host memory."""

    keys: list[BlockKey]
    parents: list[BlockKey | None]


@dataclass(frozen=True, slots=True)
class _Ended:
    """The request whose prompt ended with the key has ended."""

    keys: tuple[BlockKey]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class _Said:
    """The client of the request whose prompt ends with the key says this."""

    keys: tuple[BlockKey]
    word: ClientWord


_News = _Requested | _Stored | _Ended | _Said


class Usage:
    """News for the policies, in order; past `PENDING_KEYS_MAX` keys the oldest are forgotten.

    `pools` says what a space has now: a disk that was off and works again is indexed anew.
    """

    def __init__(
        self,
        pools: Callable[[], Sequence[SlotPool[BlockKey]]],
        downward: Downward,
        clock: Clock,
    ) -> None:
        self._pools = pools
        self._downward = downward
        self._clock = clock
        self._pending: deque[_News] = deque()
        self._pending_keys = 0
        self._told: Iterator[None] = iter(())
        self._telling = False

    def __bool__(self) -> bool:
        """Whether there is something left to tell."""
        return self._telling or bool(self._pending)

    @property
    def pending_keys(self) -> int:
        """Keys of the news that are left to tell."""
        return self._pending_keys

    def note(
        self,
        keys: list[BlockKey],
        found: int,
        tails: Sequence[list[BlockKey]] = (),
        taken_up: bool = False,
        word: ClientWord | None = None,
        tenant: str | None = None,
        brought: Set[BlockKey] = frozenset(),
    ) -> None:
        """A request came for this chain; its first `found` blocks were in a tier or on the device. It wants these tails
        of other groups too; the first of them was found behind those blocks where `taken_up`. Its client says `word`.
        It is the `tenant`'s, None where nobody knows whose it is. Those `brought` were only below host memory.
        """
        self._add(_Requested(keys, found, tails, taken_up, word, tenant, brought))

    def note_stored(self, keys: list[BlockKey], parents: list[BlockKey | None]) -> None:
        """Blocks came into host memory from the device."""
        self._add(_Stored(keys, parents))

    def note_end(self, key: BlockKey, output_tokens: int) -> None:
        """The request whose prompt ended with this key has ended."""
        self._add(_Ended((key,), output_tokens))

    def note_word(self, key: BlockKey, word: ClientWord) -> None:
        """The client of the request whose prompt ends with this key says this, later than with its lookup."""
        self._add(_Said((key,), word))

    def tell(self) -> bool:
        """Pass one slice on to the policies. False when there was nothing."""
        if not self._telling:
            if not self._pending:
                return False
            news = self._pending.popleft()
            self._pending_keys -= len(news.keys)
            self._told, self._telling = self._slices(news), True
        self._telling = next(self._told, self) is not self
        return True

    def _add(self, news: _News) -> None:
        self._pending.append(news)
        self._pending_keys += len(news.keys)
        while self._pending_keys > PENDING_KEYS_MAX:
            self._pending_keys -= len(self._pending.popleft().keys)

    def _slices(self, news: _News) -> Iterator[None]:
        """Tell one of the news; each step is a slice."""
        keys = news.keys
        if isinstance(news, _Ended):
            for pool in self._pools():
                pool.finished(keys[0], news.output_tokens, self._clock())
            return
        if isinstance(news, _Said):
            for pool in self._pools():
                tell_hint(pool.policy, keys[0], news.word, self._clock())
            return
        if isinstance(news, _Requested):
            for tier in range(len(self._pools())):
                pool = self._pools()[tier]
                # Told late, a policy would take blocks that were read meanwhile for hits of its own.
                brought = news.brought if pool.tier is Tier.HOST else frozenset()
                slots = yield from pool.finding(news.keys, brought)
                pool.requested(news.keys, self._clock(), news.word, news.tenant, slots=slots)
                for tail in news.tails:
                    pool.requested_tail(tail, self._clock(), brought)
                yield
        end = news.found if isinstance(news, _Requested) else len(keys)
        for start in range(0, end, OFFERED_AT_ONCE):
            if not self._downward:
                return
            stop = min(start + OFFERED_AT_ONCE, end)
            if isinstance(news, _Stored):
                self._downward.committed(keys[start:stop], news.parents[start:stop])
            else:
                self._downward.used(keys[start:stop], keys[start - 1] if start else None)
            yield
        if isinstance(news, _Requested) and news.taken_up and self._downward:
            self._downward.used(news.tails[0], keys[end - 1] if end else None)
