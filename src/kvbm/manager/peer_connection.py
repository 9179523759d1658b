"""One reader of another node: a thread with its connection, which sends blocks out of host memory (`peer_sending`).

The thread knows no pool and no index. It passes asks on to the loop (`Lending.request`), and sends what the loop posts:
what host memory holds, and leased blocks, by the mover (`peer_moving`) where the reader offered memory. It never waits
inside a send, so a lease is never held longer than its deadline: then the connection ends, in the middle of a block if
need be.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable

from kvbm.block import KEY_BYTES
from kvbm.clock import Clock
from kvbm.errors import KvbmError, ProtocolError
from kvbm.fleet.tls import certified
from kvbm.hashing import split_keys
from kvbm.manager.lending import Lending
from kvbm.manager.peer_messages import (
    Admitted,
    AskFor,
    Enter,
    GiveBack,
    Leave,
    Part,
    Refused,
    TellMore,
)
from kvbm.manager.peer_moving import Moving
from kvbm.manager.peer_sending import AskPlaces, Sending
from kvbm.strict import record_swallowed
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.wire import (
    ASKS_MAX,
    HEARTBEAT_S,
    NO_PLACE,
    PLACE_BYTES,
    QUIET_S_MAX,
    WIRE_VERSION,
    Ask,
    Beat,
    FromReader,
    Greeting,
    Held,
    Incoming,
    LinkEnded,
    Offer,
    Refusal,
    Stream,
    Welcome,
    framed,
    from_reader,
    one_line,
    split_places,
    tune,
)

log = logging.getLogger("kvbm.manager")

GREET_S = 5.0
NEWS_EVERY_S = 0.05
"""What came and went is told together, so often at most."""
READS_AT_ONCE = 32
ADDRESS_MAX = 1 << 63


class _Refusing(KvbmError):
    """Tell the reader this line, and end."""


class House:
    """What all connections of a node share. `gone` is called by the thread of one that has ended."""

    def __init__(
        self,
        tls: ssl.SSLContext | None,
        fleet: str,
        node: str,
        lend: Lending,
        clock: Clock,
        gone: Callable[[PeerConnection], None],
        mover: Mover | None = None,
    ) -> None:
        self.mover = mover
        self.tls, self.fleet, self.node, self.lend, self.clock, self.gone = (
            tls,
            fleet,
            node,
            lend,
            clock,
            gone,
        )
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        """So many more of these."""
        with self._lock:
            self.counts[name] += number


class PeerConnection:
    """See the module. `start`, `stop`, `join` and `describe` are the server's, `post` is the loop's."""

    def __init__(self, house: House, connection: socket.socket, host: str, refusal: str = "") -> None:
        """`refusal`: there is no room for it, which it is told in this line."""
        self.host = host
        self._no_room = refusal
        self.node = ""
        self._house, self._connection, self._lend = house, connection, house.lend
        self._clock = house.clock
        self._posted: deque[Admitted | Refused | Part | Held] = deque()
        self._open_asks: dict[int, AskPlaces] = {}
        self._sending = Sending(self._open_asks, self._clock, house.count, self._sent)
        self._fingerprint = b""
        self._block_bytes = 0
        self._admitted = self._refusing = False
        self._heard_s = self._clock()
        self._stopping = False
        self._event_lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvbm-peer-reader", daemon=True)

    def start(self) -> None:
        """Begin. Raises RuntimeError when no thread is to be had."""
        self._thread.start()

    def stop(self) -> None:
        """End soon."""
        self._stopping = True
        self._wake()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def describe(self) -> dict[str, object]:
        """For operators."""
        moving = self._sending.moving
        transport = "nixl" if moving is not None and moving.ready else "tcp"
        return {
            "host": self.host,
            "node": self.node,
            "asks": len(self._open_asks),
            "transport": transport,
        }

    def post(self, message: Admitted | Refused | Part | Held) -> None:
        self._posted.append(message)
        self._wake()

    def _wake(self) -> None:
        with self._event_lock:
            if self._event >= 0:  # else its thread has ended
                os.eventfd_write(self._event, 1)

    # ---- its thread

    def _run(self) -> None:
        trouble = ""
        stream: Stream | None = None
        try:
            tune(self._connection)
            stream = self._secured()
            self._serve(stream)
        except (OSError, KvbmError) as error:
            trouble = one_line(error)
        except Exception as error:
            # A defect of ours costs one reader.
            record_swallowed(error)
            log.exception("reader %s", self.host)
            trouble = one_line(error)
        finally:
            self._connection.close()
            if self._sending.moving is not None:
                self._sending.moving.close()
            if stream is not None:
                stream.close()
            self._lend.request(Leave(self))
            self._house.gone(self)
            with self._event_lock:
                event, self._event = self._event, -1
                os.close(event)
        level = logging.INFO if self._admitted else logging.WARNING
        ourselves = self.node == self._house.node
        if ourselves or self._no_room:  # the server has said that it is full
            level = logging.DEBUG
        if not self._admitted and not ourselves:
            self._house.count("refused")
        log.log(level, "reader %s (%s): %s", self.host, self.node or "?", trouble)

    def _secured(self) -> Stream:
        """The connection behind its TLS handshake, if there is to be one. Raises OSError and KvbmError."""
        if self._house.tls is None:
            return Stream(self._connection)
        self._connection.settimeout(GREET_S)
        secured: ssl.SSLSocket = self._house.tls.wrap_socket(self._connection, server_side=True)
        self._connection = secured
        self.node = certified(secured, self._house.fleet).node
        return Stream(secured)

    def _serve(self, stream: Stream) -> None:
        """Until an exception ends it: OSError or KvbmError."""
        incoming: Incoming[FromReader] = Incoming(stream, from_reader)
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        fd = stream.connection.fileno()
        poller.register(fd, select.POLLIN)
        while not self._stopping:
            try:
                more = self._read(incoming) if not self._refusing else False
                self._take_posted()
                if self._sending.moving is not None:
                    self._sending.moving.turn()
            except _Refusing as refusal:
                self._refuse(str(refusal))
                more = False
            moving = self._sending.moving
            blocked = self._send(stream)
            if self._refusing and self._sending.quiet:
                raise LinkEnded("refused")
            seconds = 0.0 if more else self._next_due_s()
            listening = 0 if self._refusing else select.POLLIN
            poller.modify(fd, listening | (select.POLLOUT if blocked or stream.wants_write else 0))
            mover_fd = -1 if moving is None else moving.fileno()
            if mover_fd >= 0:
                poller.register(mover_fd, select.POLLIN)
            for ready, _ in poller.poll(seconds * 1000):
                if ready == self._event:
                    os.eventfd_read(self._event)
            if mover_fd >= 0:
                poller.unregister(mover_fd)
        raise LinkEnded("the manager ends")

    def _next_due_s(self) -> float:
        """Seconds until something is due. Raises LinkEnded when the reader's time, or a lease's, is over."""
        now_s = self._clock()
        quiet_s_max = QUIET_S_MAX if self._admitted else GREET_S
        if now_s - self._heard_s >= quiet_s_max:
            raise LinkEnded(f"nothing was heard for {quiet_s_max:.0f} s")
        sending = self._sending
        lease_s = sending.deadline_s()
        if lease_s is not None and now_s >= lease_s:
            raise LinkEnded("it takes its blocks too slowly: their lease has ended")
        dues_s = [self._heard_s + quiet_s_max]
        if sending.told_s is not None:
            if now_s >= sending.told_s + NEWS_EVERY_S:
                sending.told_s = None
                self._lend.request(TellMore(self))
            else:
                dues_s.append(sending.told_s + NEWS_EVERY_S)
        moving_s = sending.moving.due_s() if sending.moving is not None else None
        dues_s += [due_s for due_s in (lease_s, moving_s) if due_s is not None]
        if self._admitted:
            dues_s.append(sending.said_s + HEARTBEAT_S)
        return max(0.0, min(dues_s) - now_s)

    # ---- in

    def _read(self, incoming: Incoming[FromReader]) -> bool:
        """Take what has arrived. False when there is nothing left for now."""
        for _ in range(READS_AT_ONCE):
            message = incoming.next()
            if message is None:
                return False
            self._heard_s = self._clock()
            if isinstance(message, Greeting):
                self._greeted(message)
            elif not self._admitted:
                raise ProtocolError(f"{type(message).__name__} before it was let in")
            elif isinstance(message, Ask):
                self._asked(message)
            elif isinstance(message, Offer):
                self._offered(message)
            else:
                assert isinstance(message, Beat)
        return True

    def _greeted(self, greeting: Greeting) -> None:
        house = self._house
        if self._fingerprint:
            raise ProtocolError("a second Greeting")
        if greeting.version != WIRE_VERSION:
            raise _Refusing(f"version {greeting.version} of the wire is not spoken here, but {WIRE_VERSION}")
        if greeting.fleet != house.fleet:
            raise _Refusing(f"this is a node of the fleet {house.fleet!r}, not of {greeting.fleet!r}")
        if house.tls is not None and greeting.node != self.node:
            raise _Refusing(f"the certificate is of node {self.node!r}, not of {greeting.node!r}")
        self.node, self._fingerprint = greeting.node, greeting.fingerprint
        self._sending.fingerprint = greeting.fingerprint
        self._block_bytes = greeting.slot_bytes * greeting.shard_count
        if greeting.node == house.node:
            # It reached itself, by a list that names all nodes: the answer tells it so.
            self._sending.say(self._welcome())
            return
        if self._no_room:
            raise _Refusing(self._no_room)
        enter = Enter(
            self, greeting.fingerprint, greeting.slot_bytes, greeting.shard_count, greeting.known_max
        )
        self._lend.request(enter)

    def _welcome(self) -> bytes:
        house = self._house
        moves = house.mover is not None
        return framed(Welcome(version=WIRE_VERSION, fleet=house.fleet, node=house.node, moves=moves))

    def _asked(self, ask: Ask) -> None:
        if len(ask.keys) % KEY_BYTES:
            raise ProtocolError(f"{len(ask.keys)} bytes are no whole number of keys")
        if ask.number in self._open_asks or len(self._open_asks) >= ASKS_MAX:
            raise ProtocolError(f"{len(self._open_asks)} asks are open, and one more comes: {ask.number}")
        keys = split_keys(ask.keys)
        if ask.places and len(ask.places) != PLACE_BYTES * len(keys):
            raise ProtocolError(f"{len(ask.places)} bytes of places for {len(keys)} keys")
        self._open_asks[ask.number] = self._places(ask)
        self._lend.request(AskFor(self, ask.number, keys))

    def _places(self, ask: Ask) -> AskPlaces:
        moving = self._sending.moving
        if not ask.places or moving is None or moving.offer.number != ask.offer:
            return AskPlaces()
        places = split_places(ask.places)
        beyond = [place for place in places if place != NO_PLACE and place >= moving.offer.places]
        if beyond:
            raise ProtocolError(f"place {beyond[0]} of {moving.offer.places}")
        return AskPlaces(ask.offer, tuple(places))

    def _offered(self, offer: Offer) -> None:
        house, before = self._house, self._sending.moving
        if house.mover is None:
            raise ProtocolError("an Offer, and there is no mover here")
        end = offer.address + offer.places * offer.place_bytes
        if end >= ADDRESS_MAX:
            raise ProtocolError(f"an Offer of memory up to {end:#x}, beyond what an address may be")
        if before is not None:
            before.close()
        self._sending.moving = Moving(house.mover, offer, self._block_bytes, self._clock)

    def _take_posted(self) -> None:
        while self._posted:
            message = self._posted.popleft()
            if isinstance(message, Admitted):
                self._admitted = True
                self._house.count("readers")
                log.info("reader %s (%s): let in", self.host, self.node)
                self._sending.say(self._welcome())
            elif isinstance(message, Refused):
                raise _Refusing(message.line)
            elif isinstance(message, Part):
                self._sending.lend(message)
            else:
                self._sending.say(framed(message), news=True)

    def _refuse(self, line: str) -> None:
        """Say why, after what is half said; then `_serve` ends."""
        self._refusing = True
        self._sending.only_frames()
        self._sending.say(framed(Refusal(line=line)))
        level = logging.DEBUG if self._no_room else logging.INFO
        log.log(level, "reader %s (%s): refused: %s", self.host, self.node or "?", line)

    # ---- out

    def _send(self, stream: Stream) -> bool:
        """Send what there is. Whether bytes are left that the socket does not take now."""
        sending = self._sending
        quiet = sending.quiet and not self._refusing
        if quiet and self._admitted and self._clock() - sending.said_s >= HEARTBEAT_S:
            sending.say(framed(Held()))
        return sending.send(stream)

    def _sent(self, part: Part) -> None:
        """A part is over: give its lease back."""
        if part.last:
            self._open_asks.pop(part.ask, None)
        if part.lease:
            self._lend.request(GiveBack(self, part.lease))
