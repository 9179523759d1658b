"""The tier that reads blocks out of other nodes' host memory. It stores nothing: a block reaches a peer by itself.

There is one link, and one thread, for each peer that the directory names. What fails costs that peer's hits, so the
tier itself is never off: a block of a peer that cannot be reached is not known.
"""

from __future__ import annotations

import logging
import os
import random
import ssl
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from kvbm.block import BlockKey, Outcome
from kvbm.clock import Clock
from kvbm.fleet.directory import Directory, Peer
from kvbm.layout import BlockLayout, Namespace
from kvbm.tiers.contract import CLOSE_LIMIT_S, BlockHead, Completion
from kvbm.tiers.peers.known import Known, link_of, prints_of
from kvbm.tiers.peers.loads import Load
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.options import PeerOptions
from kvbm.tiers.peers.pace import Pace
from kvbm.tiers.peers.reader import PeerLink
from kvbm.tiers.peers.waits import Waits
from kvbm.tiers.remote.contract import NOWHERE, Buffers, News

log = logging.getLogger("kvbm.tiers")

SEEN_MAX = 65_536
"""Blocks that were loaded and are remembered, so that `news` can tell when they go."""
NEWS_AT_ONCE = 4096


def open_peer_tier(
    directory: Directory,
    layout: BlockLayout,
    namespace: Namespace,
    options: PeerOptions,
    clock: Clock,
    tls: ssl.SSLContext | None = None,
    random_number: Callable[[], float] = random.random,
    mover: Mover | None = None,
) -> PeerTier:
    """The blocks of this namespace in the memory of the directory's nodes.

    `tls` is `kvbm.fleet.tls.reading_context`, or None for plain TCP. With a `mover`, peers that have one too
    bring blocks by it. Both stay the caller's, as the directory does. Links to peers begin here, and come up by
    themselves.
    """
    return PeerTier(directory, layout, namespace.fingerprint, options, clock, tls, random_number, mover)


class PeerTier:
    """A `RemoteTier` that only loads. See the module."""

    name = "peers"
    store_blocks_max = 1

    def __init__(
        self,
        directory: Directory,
        layout: BlockLayout,
        fingerprint: bytes,
        options: PeerOptions,
        clock: Clock,
        tls: ssl.SSLContext | None,
        random_number: Callable[[], float],
        mover: Mover | None,
    ) -> None:
        self.pending_limit = options.pending_limit
        self.load_blocks_max = options.load_blocks_max
        self._directory, self._layout, self._fingerprint = directory, layout, fingerprint
        self._options, self._clock, self._tls, self._random = options, clock, tls, random_number
        self._mover = mover
        self._known = Known()
        self._links: dict[Peer, PeerLink] = {}
        self._by_number: dict[int, PeerLink] = {}
        self._leaving: list[PeerLink] = []
        self._left_out = 0
        self._pending = 0
        self._done: deque[tuple[Completion, Load]] = deque()
        self._pace = Pace()
        # Blocks that were loaded, by key, and what `news` has yet to tell.
        self._seen: OrderedDict[BlockKey, None] = OrderedDict()
        self._came: OrderedDict[BlockKey, None] = OrderedDict()
        self._gone: OrderedDict[BlockKey, None] = OrderedDict()
        self._swept: deque[BlockKey] = deque()
        self._closed = False
        self._event_lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._follow_directory()

    # ---- where blocks are

    def places(self, keys: Sequence[BlockKey]) -> list[int]:
        return self._known.places(prints_of(keys))

    def tail(self, place: int) -> bool:
        return self._known.is_tail(place)

    def used(self, keys: Sequence[BlockKey], may_tell: Callable[[], bool]) -> None:
        """Nothing: a peer keeps what is in use there."""

    def held_elsewhere(self, keys: Sequence[BlockKey]) -> bytes:
        """Whether some peer is believed to hold each block, a byte each: 1 or 0. From memory: about 1 µs a key."""
        return self._known.holds(prints_of(keys))

    def news(self) -> News:
        """Blocks that were loaded, and those of them that no peer is known to hold any more."""
        came = [self._came.popitem(last=False)[0] for _ in range(min(NEWS_AT_ONCE, len(self._came)))]
        gone = [self._gone.popitem(last=False)[0] for _ in range(min(NEWS_AT_ONCE, len(self._gone)))]
        return News(came, gone)

    def _loaded(self, key: BlockKey) -> None:
        self._gone.pop(key, None)
        if key not in self._seen:
            self._seen[key] = self._came[key] = None
            if len(self._seen) > SEEN_MAX:
                self._forgotten(self._seen.popitem(last=False)[0])

    def _forgotten(self, key: BlockKey) -> None:
        self._seen.pop(key, None)
        if key in self._came:
            del self._came[key]  # nobody was told
        else:
            self._gone[key] = None
            if len(self._gone) > SEEN_MAX:
                self._gone.popitem(last=False)

    def _sweep(self) -> None:
        """Look whether a part of the blocks that were loaded is still held."""
        if not self._swept:
            self._swept.extend(self._seen)
        keys = [self._swept.popleft() for _ in range(min(NEWS_AT_ONCE, len(self._swept)))]
        for key, held in zip(keys, self.held_elsewhere(keys), strict=True):
            if not held and key in self._seen:
                self._forgotten(key)

    # ---- loads

    def submit_load(
        self,
        job_id: int,
        keys: Sequence[BlockKey],
        place: int,
        targets: Sequence[Buffers],
        tenant: str | None,
    ) -> Outcome:
        assert 0 < len(keys) <= self.load_blocks_max and len(keys) == len(targets)
        if self._closed:
            return Outcome.RETRY
        if self._pending >= self.pending_limit:
            return Outcome.THROTTLED
        link = self._by_number.get(link_of(place)) if place != NOWHERE else None
        now_s = self._clock()
        load = Load(job_id, tuple(keys), targets, now_s, now_s + self._options.deadline_s)
        if link is None or not link.submit(load):
            return Outcome.MISS
        self._pending += 1
        return Outcome.PENDING

    def submit_store(
        self,
        job_id: int,
        blocks: Sequence[BlockHead],
        sources: Sequence[Buffers],
        tenant: str | None,
        tail: bool = False,
    ) -> Outcome:
        """Nothing is stored here: RETRY."""
        return Outcome.RETRY

    @property
    def load_room(self) -> int:
        return max(0, self.pending_limit - self._pending)

    @property
    def store_room(self) -> int:
        return 0

    def expected_s(self, byte_count: int) -> float:
        return self._pace.expected_s(byte_count)

    def poll(self) -> list[Completion]:
        if self._event >= 0:
            try:
                os.eventfd_read(self._event)  # before looking: what comes meanwhile signals again
            except BlockingIOError:
                pass
        completions: list[Completion] = []
        while self._done:
            completion, load = self._done.popleft()
            self._pending -= 1
            completions.append(completion)
            for key, end in zip(load.keys, completion.blocks, strict=True):
                if end.outcome is Outcome.HIT:
                    self._loaded(key)
            if completion.outcome is Outcome.HIT:
                ended_s = completion.seconds + load.began_s
                latency_s = load.answered_s - load.asked_s
                self._pace.took(latency_s, ended_s - load.answered_s, completion.bytes_moved)
        if self._closed and not self._pending:
            self._close_event()
        return completions

    def _completed(self, completion: Completion, load: Load) -> None:
        """Called by the links' threads."""
        with self._event_lock:
            self._done.append((completion, load))
            os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        assert self._event >= 0, "the tier is closed"
        return self._event

    # ---- time

    @property
    def fault(self) -> str:
        return ""

    @property
    def store_fault(self) -> str:
        return "other nodes' memory is only read"

    def tick(self) -> None:
        """Follow the directory; the links look at the clock."""
        if not self._closed:
            self._follow_directory()
            self._sweep()
            for link in self._links.values():
                link.wake()

    def _follow_directory(self) -> None:
        self._leaving = [link for link in self._leaving if not self._has_left(link)]
        wanted = [peer for peer in self._directory.peers() if peer.node != self._options.node]
        wanted = list(dict.fromkeys(wanted))
        self._bounded(len(wanted))
        wanted = wanted[: self._options.peers_max]
        for peer in [peer for peer in self._links if peer not in wanted]:
            link = self._links.pop(peer)
            link.stop()
            self._leaving.append(link)
        for peer in wanted:
            # Those that leave count as well, so that threads stay bounded.
            if peer not in self._links and len(self._by_number) < 2 * self._options.peers_max:
                blocks = self._known.add_link(self._options.known_max)
                self._links[peer] = self._by_number[blocks.number] = PeerLink(
                    peer,
                    blocks,
                    self._layout,
                    self._fingerprint,
                    self._options,
                    self._tls,
                    self._clock,
                    Waits(self._random),
                    self._completed,
                    self._mover,
                )

    def _bounded(self, listed: int) -> None:
        """Say that there are nodes too many, once until it changes."""
        left_out = max(0, listed - self._options.peers_max)
        if left_out and not self._left_out:
            log.warning(
                "the fleet %s has %d nodes and at most %d are read from: the last %d of the list are left out",
                *(self._options.fleet, listed, self._options.peers_max, left_out),
            )
        self._left_out = left_out

    def _has_left(self, link: PeerLink, timeout_s: float = 0.0) -> bool:
        if not link.join(timeout_s):
            return False
        self._known.remove_link(link.blocks)
        self._by_number.pop(link.blocks.number, None)
        return True

    def describe(self) -> dict[str, object]:
        links = [link.describe() for link in self._links.values()]
        transports = Counter(link.transport for link in self._links.values() if not link.trouble)
        others = [link for link in self._links.values() if not link.is_ourselves]
        troubles = [f"{link.peer.address}: {link.trouble}" for link in others if link.trouble]
        return {
            "place": f"peers of the fleet {self._options.fleet!r}, from {self._directory.place}",
            "directory_fault": self._directory.fault,
            "blocks": len(self._known),
            "pending": self._pending,
            "tls": self._tls is not None,
            "fleet": self._options.fleet,
            "nodes": len(others),
            "nodes_reached": len(others) - len(troubles),
            "troubles": troubles,
            "links": dict(transports),
            "notes": self._notes(transports),
            "peers": links,
        }

    def _notes(self, transports: Counter[str]) -> tuple[str, ...]:
        """For `RemoteReport`."""
        notes = []
        if self._left_out:
            notes.append(
                f"reads from {self._options.peers_max} nodes at most, and leaves {self._left_out} out"
            )
        if self._mover is not None:
            by_nixl = f"reads from {transports['nixl']} of {sum(transports.values())} nodes by NIXL"
            trouble = self._mover.trouble
            notes.append(f"reads over TCP: NIXL: {trouble}" if trouble else by_nixl)
        return tuple(notes)

    def drain(self, deadline_s: float) -> bool:
        end_s = time.monotonic() + deadline_s
        while (pending := self._pending - len(self._done)) and time.monotonic() < end_s:
            time.sleep(0.001)
        return not pending

    def close(self, deadline_s: float = CLOSE_LIMIT_S) -> None:
        if self._closed:
            return
        self._closed = True
        links = [*self._links.values(), *self._leaving]
        self._links.clear()
        for link in links:
            link.stop()
        end_s = time.monotonic() + deadline_s
        for link in links:
            # A thread that resolves a name may stay longer; it has no load.
            self._has_left(link, max(0.0, end_s - time.monotonic()))
        if not self._pending:
            self._close_event()

    def _close_event(self) -> None:
        with self._event_lock:
            if self._event >= 0:
                os.close(self._event)
                self._event = -1
