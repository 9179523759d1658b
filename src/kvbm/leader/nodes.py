"""The leader's sessions with the managers of all nodes of its engine, which look like one (`link.Link`).

Every question goes to all of them, and has one answer (`agreement`). There is a cache while all are there, with all of
their ranks; without one of them the engine computes everything.

When a manager goes, the others still hold what was leased and reserved for the questions of before. Loads that were
promised go on, as they do out of the memory of a manager that died. Then the sessions with the others are ended and
begun anew, which gives all of it back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_

from kvbm.client.channel import readable_among
from kvbm.client.finder import Finder
from kvbm.clock import Clock
from kvbm.leader.agreement import CommonLookup, CommonStore
from kvbm.leader.link import ManagerLink
from kvbm.leader.node_events import NodeEvents
from kvbm.protocol import (
    Announce,
    Commit,
    FromManager,
    Hello,
    Lookup,
    LookupReply,
    Message,
    Progress,
    Ready,
    Release,
    Reserve,
    ReserveReply,
    Shorten,
    TierEvents,
)
from kvbm.step_plan import NodeSlots

log = logging.getLogger("kvbm.leader")

PROMISED_S = 1.0
"""When a manager has gone, an engine may begin a load this long after it was promised."""
LOADED_S = 10.0
"""And this long it may take: the others' sessions end then in any case."""


class NodesLink:
    """Sessions with these managers, as one. `loading()`: loads run. Owned by the engine's thread.

    `ready` says the least that any of them has.
    """

    def __init__(
        self,
        finders: Sequence[Finder],
        hello: Hello,
        clock: Clock,
        loading: Callable[[], bool],
    ) -> None:
        self._clock = clock
        self._loading = loading
        self._links = [ManagerLink(finder, hello, clock, alone=False) for finder in finders]
        self._lives = [0] * len(self._links)
        # The managers that questions were put to, in the order of the engine's parts; empty until all are there.
        self._nodes: list[ManagerLink] = []
        self._owed: list[int] = []  # answers to lookups, of each of them
        self._said: list[Ready | None] = [None] * len(finders)
        # After one of them went: the others, and since when.
        self._left: list[ManagerLink] = []
        self._left_since_s = 0.0
        self._lookups: dict[int, CommonLookup] = {}
        self._stores: dict[int, CommonStore] = {}
        self._earlier: dict[int, CommonLookup] = {}
        self._events = NodeEvents()
        self._disagree = False
        self.ready: Ready | None = None
        self.life = 0
        self.readied = 0

    @property
    def received_s(self) -> float:
        """When the latest message arrived from the manager that is behind: of those that owe an answer, the one that
        was silent for longest."""
        owing = [link.received_s for link, owed in zip(self._nodes, self._owed, strict=True) if owed]
        return min(owing) if owing else max(link.received_s for link in self._links)

    @property
    def wants_facts(self) -> bool:
        """Whether one of them announces what its tiers hold."""
        return any(link.wants_facts for link in self._links)

    @property
    def staging(self) -> bool:
        """Whether host memory is only the staging area of one of them."""
        return any(link.staging for link in self._nodes)

    def poll(self) -> list[FromManager]:
        """The managers' messages, those that answer a question of all as one."""
        arrived = [(link, link.poll()) for link in self._links]
        self._look_at_sessions()
        taken: list[FromManager] = []
        for link, messages in arrived:
            if messages and link in self._nodes:
                node = self._nodes.index(link)
                for message in messages:
                    common = self._take(node, message) if len(self._nodes) > 1 else message
                    if common is not None:
                        taken.append(common)
        return taken

    def send(self, message: Message) -> bool:
        """To all; False where one of them has no session."""
        if len(self._nodes) > 1:
            if isinstance(message, Lookup):
                self._lookups[message.lookup] = CommonLookup(message, self._epochs())
                self._owed = [owed + 1 for owed in self._owed]
            elif isinstance(message, Reserve):
                self._stores[message.store] = CommonStore(message, self._epochs())
            elif isinstance(message, Release):
                self._released(message.lookup)
            elif isinstance(message, Commit):
                return self._commit(message)
            elif isinstance(message, Announce):
                self._events = NodeEvents(len(self._nodes))
        # A reset must not wait until all are there.
        sent = [link.send(message) for link in self._nodes or self._links]
        return all(sent)

    @contextmanager
    def in_one_write(self, later: bool = False) -> Iterator[None]:
        """As of one manager."""
        with ExitStack() as writes:
            for link in self._links:
                writes.enter_context(link.in_one_write(later))
            yield

    def wait(self, timeout_s: float) -> float:
        """Wait for a message of any, at most `timeout_s`. How many seconds it took."""
        started_s = self._clock()
        there = [(link, channel) for link in self._links if (channel := link.channel) is not None]
        busy = next((link for link, channel in there if channel.queued_bytes), None)
        if busy is not None:
            return busy.wait(timeout_s)
        if there:
            readable_among([channel.fileno() for _, channel in there], timeout_s)
        return self._clock() - started_s

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.ready = None

    def nodes_of_lookup(self, lookup: int, first: int, end: int) -> tuple[NodeSlots, ...]:
        """The slots of some blocks of a lookup at each node's manager; empty where that is not known any more."""
        common = self._lookups.get(lookup) or self._earlier.get(lookup)
        return common.slots(first, end) if common is not None else ()

    def nodes_of_store(self, store: int) -> tuple[NodeSlots, ...]:
        """The slots of a store at each node's manager."""
        common = self._stores.get(store)
        return common.slots() if common is not None else ()

    # ---- sessions

    def _look_at_sessions(self) -> None:
        lives = [link.life for link in self._links]
        if lives != self._lives:
            gone = [
                link
                for link, life, before in zip(self._links, lives, self._lives, strict=True)
                if life != before
            ]
            self._lives = lives
            self._left = [link for link in self._left if link not in gone]
            if any(link in gone for link in self._nodes):
                self._lose([link for link in self._nodes if link not in gone])
        if self._left:
            self._renew()
        said = [link.ready for link in self._links]
        if all(map(is_, said, self._said)) and len(said) == len(self._said):
            return
        self._said = said
        ready = None if self._left else self._join()
        if ready is not None and self.ready is None:
            self.readied += 1
        self.ready = ready

    def _lose(self, left: list[ManagerLink]) -> None:
        """A manager that questions were put to has gone; these are left."""
        self.life += 1
        self.ready, self._said = None, []
        self._earlier, self._lookups, self._stores = self._lookups, {}, {}
        self._nodes, self._owed, self._left, self._left_since_s = [], [], left, self._clock()

    def _renew(self) -> None:
        """End the sessions of before with the others, once no load needs them."""
        since_s = self._clock() - self._left_since_s
        if since_s < PROMISED_S or (self._loading() and since_s < LOADED_S):
            return
        for link in self._left:
            link.close()
        self._left, self._said = [], []
        self._earlier.clear()

    def _join(self) -> Ready | None:
        """What all managers say together, once those of all parts of the engine are there."""
        there = [(link, link.ready) for link in self._links if link.ready is not None]
        parts = {ready.part: (link, ready) for link, ready in there}
        counts = {ready.part_count for _, ready in there}
        if len(there) != len(parts) or counts != {len(parts)}:
            return None
        ordered = [parts[part] for part in sorted(parts)]
        links, readies = [link for link, _ in ordered], [ready for _, ready in ordered]
        if len({ready.fingerprint for ready in readies}) > 1:
            if not self._disagree:
                log.warning(
                    "serving without a KV cache: the managers of the engine's nodes have other namespaces"
                )
            self._disagree = True
            return None
        if self._nodes and self._nodes != links:
            return None  # not without a session that ended
        if not self._nodes:
            log.info("KV cache is on, over %d nodes", len(links))
            self._nodes, self._owed = links, [0] * len(links)
        return readies[0] if len(readies) == 1 else _least(readies)

    def _epochs(self) -> tuple[int, ...]:
        return tuple(link.ready.epoch if link.ready is not None else -1 for link in self._nodes)

    # ---- questions and answers

    def _take(self, node: int, message: FromManager) -> FromManager | None:
        """A manager's message; what all say with it, if that is anything."""
        if isinstance(message, LookupReply):
            return self._found(node, message)
        if isinstance(message, Progress):
            lookup = self._lookups.get(message.lookup)
            return lookup.progressed(node, message) if lookup is not None else None
        if isinstance(message, ReserveReply):
            return self._reserved(node, message)
        if isinstance(message, TierEvents):
            return self._events.take_in(node, message)
        return message

    def _found(self, node: int, message: LookupReply) -> LookupReply | None:
        """With the last answer, what not all of them have is given back."""
        lookup = self._lookups.get(message.lookup)
        if lookup is None or not lookup.lacks(node):
            return None
        self._owed[node] -= 1
        reply = lookup.replied(node, message)
        if reply is None:
            return None
        if lookup.released:
            del self._lookups[message.lookup]
        else:
            for each in lookup.surplus():
                self._nodes[each].send(Shorten(lookup=message.lookup, blocks=lookup.blocks))
        return reply

    def _released(self, number: int) -> None:
        lookup = self._lookups.get(number)
        if lookup is not None:
            lookup.released = True
            if lookup.answered:
                del self._lookups[number]

    def _reserved(self, node: int, message: ReserveReply) -> ReserveReply | None:
        store = self._stores.get(message.store)
        reply = store.replied(node, message) if store is not None else None
        if store is not None and reply is not None and store.empty:
            # Nobody will commit it: what some of them gave goes back now.
            self._commit(Commit(store=message.store))
        return reply

    def _commit(self, message: Commit) -> bool:
        store = self._stores.pop(message.store, None)
        told = store.commits(message) if store is not None else []
        sent = [self._nodes[node].send(commit) for node, commit in told]  # to all of them
        return all(sent)


def _least(readies: Sequence[Ready]) -> Ready:
    """What holds of all managers."""
    tiers = {
        tier: min(ready.tiers[tier] for ready in readies)
        for tier in readies[0].tiers
        if all(tier in ready.tiers for ready in readies)
    }
    return Ready(
        ready=True,
        epoch=readies[0].epoch,
        fingerprint=readies[0].fingerprint,
        block_bytes=sum(ready.block_bytes for ready in readies),
        lease_s=min(ready.lease_s for ready in readies),
        tiers=tiers,
        lease_blocks=min((ready.lease_blocks for ready in readies if ready.lease_blocks), default=0),
    )
