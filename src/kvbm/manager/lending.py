"""What the manager's loop does for readers on other nodes: it says what host memory holds, and leases blocks to them.

Between the loop and the threads that serve the readers (`peer_server`) lie queues. A thread asks with `request`; the
loop answers in `turn`, through the reader's `post`. The loop waits for no reader: a lease ends when its thread gives it
back, when the reader goes, or at its deadline, whichever is first. The thread compares the slots' generations after it
has sent the bytes, so a lease that ended under it becomes no wrong bytes.

Of a namespace's host memory at most a share is leased to readers, over all of them; more waits its turn.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvbm.block import BlockKey, Tier
from kvbm.clock import Clock
from kvbm.layout import Namespace
from kvbm.manager.leases import READERS, Lease, LeaseState
from kvbm.manager.peer_messages import (
    Admitted,
    AskFor,
    Enter,
    GiveBack,
    LentBlock,
    Part,
    Reader,
    Refused,
    Request,
    TellMore,
)
from kvbm.manager.space import Space
from kvbm.tiers.peers.wire import NOT_SERVED

if TYPE_CHECKING:
    from kvbm.manager.lent_news import NewsCursor, SlotNews

log = logging.getLogger("kvbm.manager")

TURN_S = 0.001
PARTS_OUT_MAX = 2
"""Parts of asks that one reader has leased at a time: one that is sent, and the next."""


class LendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`share` of host memory is leased to readers at most, in parts of at most `part_bytes` or one block, for at most
    `lease_s`.

    What is leased cannot be evicted: a twentieth leaves host memory to the node's own engines, and with parts of 8 MiB
    it is enough for many readers at once.
    """

    share: float = 0.05
    part_bytes: int = 8 << 20
    lease_s: float = 5.0


DEFAULT_OPTIONS = LendOptions()


@dataclass(slots=True, eq=False)
class _Ask:
    number: int
    keys: Sequence[BlockKey]
    done: int = 0


@dataclass(slots=True, eq=False)
class _Shop:
    """One space that readers read from. `leased` counts the blocks that they have now."""

    space: Space
    news: SlotNews
    leased: int = 0


@dataclass(slots=True, eq=False)
class _Account:
    """One reader that was let in."""

    reader: Reader
    shop: _Shop
    cursor: NewsCursor
    asks: deque[_Ask] = field(default_factory=deque)
    leases: dict[int, Lease] = field(default_factory=dict)
    wants_news: bool = True


class Lending:
    """Owned by the manager's thread, but for `request`. `turn` is to be called when `fileno` is readable,
    and about twice a second besides."""

    def __init__(
        self,
        spaces: Iterable[tuple[Namespace, Space]],
        clock: Clock,
        options: LendOptions = DEFAULT_OPTIONS,
    ) -> None:
        """`spaces` is iterated anew each time, as a `SpaceTable` is."""
        self._spaces, self._clock, self.options = spaces, clock, options
        self.counts: Counter[str] = Counter()
        """`asked`, `lent` and `absent` blocks, and leases that `expired`."""
        self._requests: deque[Request] = deque()
        self._shops: dict[bytes, _Shop] = {}
        self._accounts: dict[int, _Account] = {}
        self._waiting: deque[_Account] = deque()
        self._last_lease = 0
        self._awake = False
        self._event_lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # ---- the readers' threads

    def request(self, request: Request) -> None:
        """Ask the loop; it answers through the reader's `post`."""
        self._requests.append(request)
        self._wake()

    # ---- the manager's thread

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return self._event

    @property
    def reader_count(self) -> int:
        """Readers that are let in."""
        return len(self._accounts)

    @property
    def leased_count(self) -> int:
        """Blocks that readers have leased now."""
        return sum(shop.leased for shop in self._shops.values())

    def turn(self) -> None:
        """Do what is to be done, for about a millisecond; what is left makes `fileno` readable again."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass
        self._awake = False
        until_s = self._clock() + TURN_S
        self._look_at_spaces()
        left = self._answer(until_s)
        self._end_overdue()
        left = self._lend(until_s) or left
        left = self._tell(until_s) or left
        if left:
            self._wake()

    def close(self) -> None:
        """Every reader is sent away, every lease ends."""
        for account in list(self._accounts.values()):
            self._send_away(account, "this manager ends")
        for shop in self._shops.values():
            shop.news.close()
        self._shops.clear()
        with self._event_lock:
            os.close(self._event)
            self._event = -1

    def _wake(self) -> None:
        self._awake = True
        with self._event_lock:
            if self._event >= 0:  # else the manager ends
                os.eventfd_write(self._event, 1)

    def _happened(self) -> None:
        """Something came or went: readers that were told all are told that, one turn for many blocks."""
        if not self._awake and any(account.wants_news for account in self._accounts.values()):
            self._wake()

    # ---- requests

    def _answer(self, until_s: float) -> bool:
        """Handle requests until that time, one in any case. Whether some are left."""
        while self._requests:
            request = self._requests.popleft()
            if isinstance(request, Enter):
                self._enter(request)
            elif (account := self._accounts.get(id(request.reader))) is not None:
                if isinstance(request, AskFor):
                    self.counts["asked"] += len(request.keys)
                    account.asks.append(_Ask(request.number, request.keys))
                    if account not in self._waiting:
                        self._waiting.append(account)
                elif isinstance(request, GiveBack):
                    self._end_lease(account, request.lease)
                elif isinstance(request, TellMore):
                    account.wants_news = True
                else:
                    self._forget(account)
            if self._clock() >= until_s:
                break
        return bool(self._requests)

    def _enter(self, request: Enter) -> None:
        line = self._refusal(request)
        if line:
            request.reader.post(Refused(line))
            return
        from kvbm.manager.lent_news import NewsCursor, SlotNews

        shop = self._shops.get(request.fingerprint)
        if shop is None:
            space = self._space_of(request.fingerprint)
            assert space is not None
            shop = self._shops[request.fingerprint] = _Shop(space, SlotNews(space.held, self._happened))
        cursor = NewsCursor(shop.news, request.known_max)
        # The account keeps the reader, so that no other object can have its id.
        self._accounts[id(request.reader)] = _Account(request.reader, shop, cursor)
        request.reader.post(Admitted(request.fingerprint))

    def _refusal(self, request: Enter) -> str:
        space = self._space_of(request.fingerprint)
        short = request.fingerprint.hex()[:12]
        if space is None:
            return f"namespace {short} {NOT_SERVED}"
        layout = space.layout
        if (request.slot_bytes, request.shard_count) != (layout.slot_bytes, layout.shard_count):
            return (
                f"blocks of namespace {short} have {layout.shard_count} parts of {layout.slot_bytes} bytes here, "
                f"and {request.shard_count} of {request.slot_bytes} there"
            )
        if space.options.staging:
            return f"namespace {short} keeps no blocks in host memory here"
        return ""

    def _space_of(self, fingerprint: bytes) -> Space | None:
        for namespace, space in self._spaces:
            if not space.failure and namespace.fingerprint == fingerprint:
                return space
        return None

    # ---- leases

    def _lend(self, until_s: float) -> bool:
        """Lease blocks to those who wait, one part each in turn. Whether some could be leased that were not."""
        for _ in range(len(self._waiting)):
            account = self._waiting.popleft()
            if not account.asks or id(account.reader) not in self._accounts:
                continue
            lent = self._lend_part(account)
            if account.asks:
                self._waiting.append(account)
            if lent and self._clock() >= until_s:
                return True
        return any(map(self._can_lend, self._waiting))

    def _can_lend(self, account: _Account) -> bool:
        return len(account.leases) < PARTS_OUT_MAX and self._room(account.shop) > 0

    def _room(self, shop: _Shop) -> int:
        return max(1, int(self.options.share * shop.space.arena.slot_count)) - shop.leased

    def _lend_part(self, account: _Account) -> bool:
        """Lease the next blocks of a reader's first ask, as many as it may have now. Whether it got an answer."""
        if not self._can_lend(account):
            return False
        shop, ask = account.shop, account.asks[0]
        space = shop.space
        count = min(self._room(shop), max(1, self.options.part_bytes // space.layout.block_bytes))
        keys = list(ask.keys[ask.done : ask.done + count])
        found = space.host_pool.find_all(keys)
        slots = [slot for slot in found if slot is not None]
        held = [key for key, slot in zip(keys, found, strict=True) if slot is not None]
        number, deadline_s = 0, 0.0
        if slots:
            self._last_lease += 1
            number, deadline_s = self._last_lease, self._clock() + self.options.lease_s
            self._take_lease(account, number, deadline_s, held, slots)
        blocks = [
            None if slot is None else _lent(space, slot, key) for key, slot in zip(keys, found, strict=True)
        ]
        self.counts["lent"] += len(slots)
        self.counts["absent"] += len(keys) - len(slots)
        first = ask.done
        ask.done += len(keys)
        last = ask.done == len(ask.keys)
        if last:
            account.asks.popleft()
        account.reader.post(Part(ask.number, first, blocks, number, deadline_s, last))
        return True

    def _take_lease(
        self, account: _Account, number: int, deadline_s: float, keys: list[BlockKey], slots: list[int]
    ) -> None:
        space, count = account.shop.space, len(slots)
        sources, states = bytearray((Tier.HOST,)) * count, bytearray((LeaseState.PINNED,)) * count
        lease = Lease(READERS, number, keys, slots, sources, states, deadline_s, count)
        space.host_pool.lease_all(slots)
        space.leases.add(lease)
        account.leases[number] = lease
        account.shop.leased += count

    def _end_lease(self, account: _Account, number: int) -> None:
        lease = account.leases.pop(number, None)
        if lease is not None:
            account.shop.leased -= len(lease.slots)
            account.shop.space.release(READERS, number)  # nothing where it has ended already

    def _end_overdue(self) -> None:
        now_s = self._clock()
        for account in self._accounts.values():
            for number in [n for n, lease in account.leases.items() if lease.deadline_s <= now_s]:
                self.counts["expired"] += 1
                self._end_lease(account, number)

    # ---- readers and spaces that go

    def _forget(self, account: _Account) -> None:
        del self._accounts[id(account.reader)]
        for number in list(account.leases):
            self._end_lease(account, number)
        shop = account.shop
        if not any(other.shop is shop for other in self._accounts.values()):
            self._close_shop(shop)

    def _close_shop(self, shop: _Shop) -> None:
        for fingerprint in [f for f, other in self._shops.items() if other is shop]:
            del self._shops[fingerprint]
            shop.news.close()

    def _send_away(self, account: _Account, line: str) -> None:
        self._forget(account)
        account.reader.post(Refused(line))

    def _look_at_spaces(self) -> None:
        """Send the readers of spaces away that are gone."""
        if not self._shops:
            return
        present = {id(space) for _, space in self._spaces if not space.failure}
        for shop in list(self._shops.values()):
            if id(shop.space) not in present:
                for account in [each for each in self._accounts.values() if each.shop is shop]:
                    self._send_away(account, "the namespace is not served here any more")

    # ---- news

    def _tell(self, until_s: float) -> bool:
        """Tell readers that are ready for it. Whether there is more that could be told now."""
        left = False
        for shop in self._shops.values():
            left = shop.news.look() or left
        for account in self._accounts.values():
            if account.wants_news and account.cursor.something:
                if self._clock() >= until_s:
                    return True
                account.wants_news = False
                account.reader.post(account.cursor.take())
        return left


def _lent(space: Space, slot: int, key: BlockKey) -> LentBlock:
    name, fact = space.engine_name(slot, key), space.facts.of(slot)
    facts = b"" if fact is None else fact.text()
    arena = space.arena
    views = arena.slot_views(slot)
    return LentBlock(key, views, arena, slot, arena.generation(slot), name.engine_hash, name.group, facts)
