"""The link to one peer: a thread with one connection, which learns what the peer holds and reads blocks from it.

Only this thread touches the targets of a load, and it never waits inside a read. So a load whose time is over ends
like this: the connection is closed, and then the load completes; nothing can write to its targets after that.

A peer that fails in any way is left alone for a while, longer each time, and until a new connection works nothing is
known of it: nobody asks it for anything.

Bytes come over the connection, or where both ends have a mover, through memory of ours that the peer writes to
(`landings`); what is said goes over the connection always.
"""

from __future__ import annotations

import logging
import os
import select
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from kvbm.block import Outcome
from kvbm.clock import Clock
from kvbm.errors import KvbmError, ProtocolError
from kvbm.fleet.directory import Peer
from kvbm.hashing import join_keys
from kvbm.layout import BlockLayout
from kvbm.strict import record_swallowed
from kvbm.tiers.contract import BlockEnd, Completion
from kvbm.tiers.peers.connecting import PeerRefused, connect, greeting, refuse_welcome
from kvbm.tiers.peers.known import PeerBlocks, unpacked
from kvbm.tiers.peers.landings import Landings
from kvbm.tiers.peers.loads import Arrival, Load, MovedArrival
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.offer_pause import OfferPause
from kvbm.tiers.peers.options import PeerOptions
from kvbm.tiers.peers.waits import Waits
from kvbm.tiers.peers.wire import (
    HEARTBEAT_S,
    QUIET_S_MAX,
    Ask,
    Beat,
    FromLender,
    Held,
    Incoming,
    Lent,
    LinkEnded,
    Refusal,
    Stream,
    Welcome,
    framed,
    from_lender,
    one_line,
)

log = logging.getLogger("kvbm.tiers")

READS_AT_ONCE = 64
"""After so many reads deadlines are looked at, also while bytes keep coming."""
STEADY_S = 60.0
"""A connection that lasted so long makes up for the failures before it."""
_COUNTS = ("hits", "misses", "corrupt", "retries", "bytes", "moved")
LIES_MAX = 3
"""So many blocks with a wrong checksum, that came over the connection, end it."""


class PeerLink:
    """See the module. `submit`, `wake`, `stop` and `join` are the owner's; `done(completion, load)` is called by the
    thread, once for each load."""

    def __init__(
        self,
        peer: Peer,
        blocks: PeerBlocks,
        layout: BlockLayout,
        fingerprint: bytes,
        options: PeerOptions,
        tls: ssl.SSLContext | None,
        clock: Clock,
        waits: Waits,
        done: Callable[[Completion, Load], None],
        mover: Mover | None = None,
    ) -> None:
        self.peer = peer
        self.blocks = blocks
        self.node = peer.node
        self.trouble = "not connected yet"
        """Empty while the connection works, else why it does not: one line."""
        self.is_ourselves = False
        self.counts: Counter[str] = Counter()
        self._layout, self._fingerprint, self._options = layout, fingerprint, options
        self._tls, self._clock, self._waits, self._done = tls, clock, waits, done
        self._lock = threading.Lock()
        # Guarded by the lock: loads that were not asked for yet, and whether more are taken.
        self._queue: deque[Load] = deque()
        self._open = False
        self._asked: dict[int, Load] = {}
        self._ask_number = 0
        self._outgoing = bytearray()
        self._arrival: Arrival | None = None
        self._mover = mover
        self._offer_pause = OfferPause(clock)
        self._landings = self._new_landings()
        self.transport = "tcp"
        """How the last block came, on this connection: "tcp" or "nixl"."""
        self._lies = 0
        self._heard_s = self._said_s = 0.0
        self._stopping = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"kvbm-peer-{blocks.number}", daemon=True)
        self._thread.start()

    # ---- the owner's thread

    def submit(self, load: Load) -> bool:
        """Read these blocks; False where the peer cannot be reached now."""
        with self._lock:
            if not self._open:
                return False
            self._queue.append(load)
        self.wake()
        return True

    def wake(self) -> None:
        """Look at the queue and at the clock."""
        os.eventfd_write(self._event, 1)

    def stop(self) -> None:
        """End soon: what is under way completes without its bytes."""
        self._stopping = True
        self.wake()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, within so many seconds. To be called after `stop`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
        return True

    def describe(self) -> dict[str, object]:
        """For operators."""
        counts = {name: self.counts[name] for name in _COUNTS}
        known = len(self.blocks.places)
        return {
            "address": self.peer.address,
            "node": self.node,
            "trouble": self.trouble,
            "transport": self.transport,
            "blocks": known,
            **counts,
        }

    # ---- the link's thread

    def _run(self) -> None:
        while not self._over():
            began_s = self._clock()
            try:
                self._serve(self._connect())
            except (OSError, ValueError, KvbmError) as error:  # ValueError: an address that no name can have
                trouble = one_line(error)
            except Exception as error:
                # A defect of ours costs one peer's blocks.
                record_swallowed(error)
                log.exception("link to peer %s", self.peer.address)
                trouble = one_line(error)
            if self._over():
                break
            if self._clock() - began_s >= STEADY_S:
                self._waits.succeeded()
            if trouble != self.trouble:
                log.warning("peer %s (%s): %s", self.peer.address, self.node or "?", trouble)
            self.trouble = trouble
            self._pause(self._clock() + self._waits.failed())

    def _over(self) -> bool:
        return self._stopping or self.is_ourselves

    def _pause(self, until_s: float) -> None:
        while not self._stopping and (left_s := until_s - self._clock()) > 0:
            self._wait(min(left_s, 5.0))

    def _connect(self) -> Stream:
        """Raises OSError, ValueError and KvbmError."""
        stream, node = connect(self.peer, self._options, self._tls)
        self.node = node or self.node
        return stream

    def _serve(self, stream: Stream) -> None:
        """Until the connection ends, which an exception tells: OSError or KvbmError."""
        self._said_s = self._heard_s = self._clock()
        self._lies = 0
        self._landings, self.transport = self._new_landings(), "tcp"
        self._outgoing += framed(
            greeting(self._options, self._fingerprint, self._layout, self.blocks.blocks_max)
        )
        incoming: Incoming[FromLender] = Incoming(stream, from_lender)
        trouble: Exception | None = None
        try:
            while not self._over():
                more = self._read(stream, incoming)
                offer = self._landings.turn()
                if offer is not None:
                    self._outgoing += framed(offer)
                self._ask()
                self._beat()
                blocked = self._send(stream)
                next_s = self._next_due_s()
                if not more:
                    events = select.POLLIN | (select.POLLOUT if blocked or stream.wants_write else 0)
                    polled = [(stream.connection.fileno(), events), (self._landings.fileno(), select.POLLIN)]
                    self._wait(next_s, polled)
            raise LinkEnded("the tier is closed")
        except Exception as error:
            trouble = error
            raise
        finally:
            stream.close()  # before anything completes
            self._end_all(one_line(trouble))

    def _end_all(self, reason: str) -> None:
        with self._lock:
            self._open = False
            left = [*self._asked.values(), *self._queue]
            self._asked.clear()
            self._queue.clear()
        self._arrival = None
        self._landings.close()
        self._outgoing.clear()
        self.blocks.forget()
        for load in left:
            self._complete(load, reason)

    def _new_landings(self) -> Landings:
        options, block_bytes = self._options, self._layout.block_bytes
        return Landings(self._mover, block_bytes, options.staging_bytes, self._offer_pause, self._clock)

    def _wait(self, seconds: float, polled: Iterable[tuple[int, int]] = ()) -> None:
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        for fd, events in polled:
            if fd >= 0:
                poller.register(fd, events)
        for fd, _ in poller.poll(max(0.0, seconds) * 1000):
            if fd == self._event:
                os.eventfd_read(self._event)

    def _next_due_s(self) -> float:
        """Seconds until something is due. Raises LinkEnded when a load's time, or the peer's, is over."""
        now_s = self._clock()
        due_s = min(self._heard_s + QUIET_S_MAX, self._said_s + HEARTBEAT_S)
        if not self._open:
            due_s = min(due_s, self._heard_s + self._options.connect_timeout_s)
        if self._asked:
            due_s = min(due_s, *(load.deadline_s for load in self._asked.values()))
            if any(load.deadline_s <= now_s for load in self._asked.values()):
                raise LinkEnded(f"a load took longer than {self._options.deadline_s:g} s")
        quiet_s = now_s - self._heard_s
        if quiet_s >= (QUIET_S_MAX if self._open else self._options.connect_timeout_s):
            raise LinkEnded(f"nothing was heard for {quiet_s:.0f} s")
        with self._lock:
            late = [load for load in self._queue if load.deadline_s <= now_s]
            for load in late:
                self._queue.remove(load)
            if self._queue:
                due_s = min(due_s, *(load.deadline_s for load in self._queue))
        for load in late:
            self._complete(load, "the peer has too much to send")
        return due_s - now_s

    # ---- out

    def _ask(self) -> None:
        while len(self._asked) < self._options.window:
            with self._lock:
                if not self._queue:
                    return
                load = self._queue.popleft()
            self._ask_number += 1
            load.asked_s = self._clock()
            self._asked[self._ask_number] = load
            offer, joined = self._landings.places_for(self._ask_number, len(load.keys))
            ask = Ask(number=self._ask_number, keys=join_keys(load.keys), offer=offer, places=joined)
            self._outgoing += framed(ask)

    def _beat(self) -> None:
        if self._open and not self._outgoing and self._clock() - self._said_s >= HEARTBEAT_S:
            self._outgoing += framed(Beat())

    def _send(self, stream: Stream) -> bool:
        """Whether bytes are left that the socket does not take now."""
        while self._outgoing:
            count = stream.send(memoryview(bytes(self._outgoing)))
            if not count:
                return True
            self._said_s = self._clock()
            del self._outgoing[:count]
        return False

    # ---- in

    def _read(self, stream: Stream, incoming: Incoming[FromLender]) -> bool:
        """Take what has arrived, a bounded part of it. False when there is nothing left for now."""
        for _ in range(READS_AT_ONCE):
            if self._arrival is not None:
                if not self._arrival.receive(stream):
                    return False
                if self._arrival.complete:
                    moved = self._arrival.moved
                    self._arrived(self._arrival)
                    if moved:  # it was copied just now: look at deadlines
                        self._heard_s = self._clock()
                        return True
            else:
                message = incoming.next()
                if message is None:
                    return False
                self._take(message)
            self._heard_s = self._clock()
        return True

    def _take(self, message: FromLender) -> None:
        if isinstance(message, Refusal):
            raise PeerRefused(f"it refuses us: {' '.join(message.line.split())}")
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif not self._open:
            raise ProtocolError(f"{type(message).__name__} before Welcome")
        elif isinstance(message, Held):
            self._held(message)
        else:
            self._answered(message)

    def _welcomed(self, message: Welcome) -> None:
        if self._open:
            raise ProtocolError("a second Welcome")
        refuse_welcome(message, self._options, self.node if self._tls is not None else None)
        self.node = message.node
        if message.node == self._options.node:
            self.is_ourselves = True
            self.trouble = "it is this node itself"
            return
        if message.moves:
            self._landings.allow()
        log.info("peer %s (%s): connected", self.peer.address, self.node)
        self.trouble = ""
        with self._lock:
            self._open = True

    def _held(self, message: Held) -> None:
        try:
            gone, came, tails = map(unpacked, (message.gone, message.came, message.tails))
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if message.again:
            self.blocks.forget()
        self.blocks.gone(gone)
        if came:
            self.blocks.came(came)
        if tails:
            self.blocks.came(tails, tail=True)

    def _answered(self, message: Lent) -> None:
        load = self._asked.get(message.ask)
        if load is None or message.index >= len(load.keys) or load.ends[message.index] is not None:
            raise ProtocolError(f"a block {message.ask}/{message.index} that was not asked for")
        load.answered_s = load.answered_s or self._clock()
        if message.moved:
            source = self._landings.source(message.ask, message.index, message.size)
            self._arrival = MovedArrival(load, message, self._fingerprint, source)
        elif message.there:
            self._landings.unused(message.ask, message.index)
            self._arrival = Arrival(load, message, self._fingerprint)
        else:
            self._ended(message.ask, load, message.index, BlockEnd(Outcome.MISS))

    def _arrived(self, arrival: Arrival) -> None:
        self._arrival = None
        end, head = arrival.end(), arrival.head
        self.transport = "nixl" if arrival.moved else "tcp"
        self.counts["moved"] += arrival.moved and end.outcome is Outcome.HIT
        self._ended(head.ask, arrival.load, head.index, end)
        if end.outcome is Outcome.HIT:
            self._waits.succeeded()
        if end.corrupt and arrival.moved:
            # Not the peer's lie: it may be a card's, and the other blocks of this ask may have it too.
            self._landings.distrust()
        elif end.corrupt:
            self._lies += 1
            if self._lies >= LIES_MAX:
                raise LinkEnded(f"{self._lies} blocks with wrong bytes")

    def _ended(self, number: int, load: Load, index: int, end: BlockEnd) -> None:
        load.ends[index] = end
        if end.outcome is not Outcome.HIT:
            self.blocks.drop(load.keys[index])
        if load.ended:
            del self._asked[number]
            self._landings.ended(number)
            self._complete(load)

    def _complete(self, load: Load, error: str = "") -> None:
        error = f"peer {self.peer.address}: {error}" if error else ""
        completion = load.completion(self._clock(), self._layout.block_bytes, error)
        for end in completion.blocks:
            kind = {Outcome.HIT: "hits", Outcome.MISS: "misses"}.get(end.outcome, "retries")
            self.counts["corrupt" if end.corrupt else kind] += 1
        self.counts["bytes"] += completion.bytes_moved
        self._done(completion, load)
