"""The reader's side of blocks that a lender's mover brings: memory offered to it, and its places.

The lender writes into memory of this connection alone, and never into a load's targets. Nothing here waits: until the
mover has answered, and after it has gone, asks name no places, and blocks come over the connection. An offer that does
harm, or that the lender makes no use of, is withdrawn, and another one made after a pause.
"""

from __future__ import annotations

import logging

import msgspec

from kvbm.clock import Clock
from kvbm.errors import ProtocolError
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.mover_wire import Channel, Expect, Mapped, Unmapped
from kvbm.tiers.peers.offer_pause import OfferPause
from kvbm.tiers.peers.staging import Staging, places_within
from kvbm.tiers.peers.wire import NO_PLACE, Offer, joined_places

log = logging.getLogger("kvbm.tiers")

UNUSED_MAX, UNUSED_S = 64, 10.0
"""So many answers in a row, over so long, that came over the connection though a place was named: the lender makes no
use of the offer. It takes a second or more to reach a mover, and longer to start one."""


class _Landing:
    """One offer. `channel` is None when its mover has gone; its memory stays while asks name it."""

    def __init__(self, number: int, channel: Channel, staging: Staging) -> None:
        self.number, self.staging = number, staging
        self.channel: Channel | None = channel
        self.offered = False
        self.asks = 0
        self.unused, self.unused_since_s = 0, 0.0
        """Answers in a row that named places were not used for, and when the first of them came."""


class Landings:
    """Of one connection; owned by its thread. Without a mover nothing is ever offered."""

    def __init__(
        self,
        mover: Mover | None,
        block_bytes: int,
        staging_bytes: int,
        pause: OfferPause,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._mover, self._block_bytes, self._pause = mover, block_bytes, pause
        self._places = places_within(staging_bytes, block_bytes)
        self._allowed = False
        self._tried = 0
        self._number = 0
        self._now: _Landing | None = None
        self._asks: dict[int, tuple[_Landing, list[int]]] = {}

    def allow(self) -> None:
        """The lender takes offers."""
        self._allowed = self._mover is not None and self._places > 0

    def distrust(self) -> None:
        """What lay there was not what the lender sealed: nothing is offered for a while, on later connections too.

        More of it may follow: blocks that were asked for before this.
        """
        if self._now is not None:
            seconds = self._withdraw(self._now)
            log.warning(
                "NIXL brought other bytes than were sent: blocks of this node come over TCP for %.0f s",
                seconds,
            )

    def fileno(self) -> int:
        """Readable when `turn` has something to do; -1 where there is nothing to wait for."""
        landing = self._now
        return -1 if landing is None or landing.channel is None else landing.channel.fileno()

    def turn(self) -> Offer | None:
        """Look at the mover. What is to be offered now, if anything."""
        mover = self._mover
        if mover is None or not self._allowed:
            return None
        if self._now is None:
            if not mover.running or mover.starts == self._tried or not self._pause.over:
                return None
            self._tried = mover.starts
            self._begin(mover)
        return self._listen()

    def _begin(self, mover: Mover) -> None:
        try:
            staging = Staging(self._block_bytes, self._places)
            channel = mover.open(staging, lands=True)
        except OSError as error:  # no memory, or no mover: blocks come over the connection
            log.debug("no memory is offered: %s", error)
            return
        self._number += 1
        self._now = _Landing(self._number, channel, staging)

    def _listen(self) -> Offer | None:
        landing = self._now
        if landing is None or landing.channel is None:
            return None
        try:
            message = landing.channel.receive()
        except (OSError, msgspec.MsgspecError):
            self._lose(landing)
            return None
        if isinstance(message, Unmapped):
            seconds = self._withdraw(landing)
            log.warning(
                "NIXL takes no memory for blocks of another node, for %.0f s: %s", seconds, message.line
            )
        elif isinstance(message, Mapped):
            landing.offered = True
            return Offer(
                number=landing.number,
                metadata=message.metadata,
                address=message.address,
                place_bytes=self._block_bytes,
                places=landing.staging.places,
            )
        return None

    def _withdraw(self, landing: _Landing) -> float:
        """Offer again after so many seconds, also to the same mover."""
        self._lose(landing)
        self._tried = 0
        return self._pause.begin()

    def _lose(self, landing: _Landing) -> None:
        if landing.channel is not None:
            landing.channel.close()
            landing.channel = None
        if self._now is landing:
            self._now = None
        if not landing.asks:
            landing.staging.close()

    # ---- asks

    def places_for(self, ask: int, count: int) -> tuple[int, bytes]:
        """Which offer and places an ask of so many blocks names: no places for those that there is no room for."""
        landing = self._now
        if landing is None or not landing.offered or not landing.staging.free:
            return 0, b""
        staging = landing.staging
        taken = [staging.take() for _ in range(min(count, staging.free))]
        self._asks[ask] = landing, taken
        landing.asks += 1
        if landing.asks == 1:
            self._expect(landing, True)
        return landing.number, joined_places([*taken, *[NO_PLACE] * (count - len(taken))])

    def source(self, ask: int, index: int, size: int) -> memoryview:
        """Where the lender says that a block lies. Raises ProtocolError where it cannot."""
        landing, places = self._asks.get(ask, (None, []))
        if landing is None or index >= len(places) or size > self._block_bytes:
            raise ProtocolError(f"a block {ask}/{index} of {size} bytes was moved, and no place named for it")
        landing.unused = 0
        return landing.staging.view(places[index], size)

    def unused(self, ask: int, index: int) -> None:
        """The lender sends this block over the connection."""
        landing, places = self._asks.get(ask, (None, []))
        if landing is None or landing is not self._now or index >= len(places):
            return
        now_s = self._clock()
        if not landing.unused:
            landing.unused_since_s = now_s
        landing.unused += 1
        if landing.unused >= UNUSED_MAX and now_s - landing.unused_since_s >= UNUSED_S:
            seconds = self._withdraw(landing)
            log.warning(
                "a node brings no blocks by NIXL: they come over TCP, and it is tried again in %.0f s",
                seconds,
            )

    def ended(self, ask: int) -> None:
        """All blocks of an ask have their answer."""
        landing, places = self._asks.pop(ask, (None, []))
        if landing is None:
            return
        for place in places:
            landing.staging.give_back(place)
        landing.asks -= 1
        if not landing.asks:
            self._expect(landing, False)
            if landing is not self._now:
                landing.staging.close()

    def _expect(self, landing: _Landing, on: bool) -> None:
        if landing.channel is None:
            return
        try:
            landing.channel.send(Expect(on=on))
        except OSError:
            self._lose(landing)

    def close(self) -> None:
        """The connection is over: nothing lands any more that anybody would read."""
        self._asks.clear()
        if self._now is not None:
            self._now.asks = 0
            self._lose(self._now)
