"""An operator's pins, which are leases on the blocks of a prompt, and prefetches. A pin has an expiry, and all pins
together a bounded share of host memory, so that engines go on storing. Prefetches go below what engines wait for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import Any

from kvbm.admin_protocol import Pin, Pinned, Prefetch, Prefetched, Unpin, Unpinned
from kvbm.block import KEY_BYTES, BlockKey
from kvbm.clock import Clock
from kvbm.errors import ProtocolError
from kvbm.grouping import Grouping
from kvbm.hashing import split_keys
from kvbm.manager.administration import refuse_other_roles
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.leases import PINS
from kvbm.manager.prefetching import Cause
from kvbm.manager.session import Session
from kvbm.manager.space import Space

PINNED_SHARE = 0.25
"""The part of a namespace's host memory that its pins may hold."""
PIN_S_MAX = 7 * 86400.0


class Pins:
    """Handlers of an operator's messages about the blocks of a prompt. Owned by the manager's thread."""

    def __init__(self, spaces: SpaceTable, clock: Clock) -> None:
        self._spaces = spaces
        self._clock = clock
        self._numbers = count(1)
        # The last key of the chain that each pin was asked for, which may be longer than what was found.
        self._asked: dict[int, BlockKey] = {}

    @property
    def handlers(self) -> dict[type, Callable[[Session, Any], Iterator[None] | None]]:
        """What answers each message."""
        return {Pin: self.pin, Unpin: self.unpin, Prefetch: self.prefetch}

    def pin(self, session: Session, message: Pin) -> Iterator[None]:
        """Lease the chain's blocks in the operator's name, and bring up those that are on disk. Or only the latter."""
        refuse_other_roles(session, message)
        keys, space = checked_keys(message.keys), space_of(self._spaces, message.fingerprint)
        if not 0 <= message.seconds <= PIN_S_MAX:
            raise ProtocolError(f"pin seconds={message.seconds} cannot be served: 0 to {PIN_S_MAX:.0f}")
        if refusal := _refusal(space):
            session.send(Pinned(refusal=refusal))
            return
        assert space is not None
        if not message.seconds:
            session.send((yield from _brought_up(space, keys)))
            return
        self._end(space, keys[-1:])
        blocks_max = int(space.arena.slot_count * PINNED_SHARE)
        room = blocks_max - sum(len(lease.slots) for lease in space.leases.of(PINS))
        if room <= 0 or not space.leases.has_room(PINS):
            session.send(Pinned(blocks_max=blocks_max, refusal=_taken("pins", blocks_max)))
            return
        number = next(self._numbers)
        found = yield from space.looking_up(PINS, number, _that_fit(space, keys, room), 0)
        lease = found.lease
        if lease is None:
            session.send(Pinned(blocks_max=blocks_max))
            return
        lease.deadline_s = self._clock() + message.seconds
        self._asked[number] = keys[-1]
        blocks, ready = len(lease.slots), lease.ready
        if lease.boundary:  # blocks of the prompt, of which there are more in all groups
            blocks, ready = lease.prompt_blocks, lease.prompt_blocks * lease.ready // blocks
        session.send(Pinned(blocks=blocks, ready=ready, blocks_max=blocks_max))

    def prefetch(self, session: Session, message: Prefetch) -> Iterator[None]:
        """Bring up what a session would ask for next."""
        refuse_other_roles(session, message)
        space = space_of(self._spaces, message.fingerprint)
        if refusal := _refusal(space):
            session.send(Prefetched(refusal=refusal))
            return
        assert space is not None
        known = space.foresight.sessions.get(message.tenant, message.session)
        keys = known.keys() if known is not None else []
        found = yield from _brought_up(space, keys)
        session.send(
            Prefetched(
                known=known is not None,
                asked=len(keys),
                blocks=found.blocks,
                ready=found.ready,
                blocks_max=found.blocks_max,
                refusal=found.refusal,
            )
        )

    def unpin(self, session: Session, message: Unpin) -> None:
        """End pins."""
        refuse_other_roles(session, message)
        space, last = space_of(self._spaces, message.fingerprint), checked_keys(message.last_keys)
        pins, blocks = self._end(space, last or None) if space is not None else (0, 0)
        session.send(Unpinned(pins=pins, blocks=blocks))

    def expire(self) -> None:
        """End the pins that are past their time, also of a namespace without engines."""
        now_s = self._clock()
        kept = set()
        for _, space in self._spaces:
            for lease in space.leases.of(PINS):
                if (lease.final and not lease.slots) or lease.deadline_s <= now_s:
                    space.release(PINS, lease.number)
                else:
                    kept.add(lease.number)
        self._asked = {number: key for number, key in self._asked.items() if number in kept}

    def _end(self, space: Space, last: list[BlockKey] | None) -> tuple[int, int]:
        """End the pins of chains that end with one of these keys, or all; how many, and their blocks."""
        meant = [
            lease for lease in space.leases.of(PINS) if last is None or self._asked.get(lease.number) in last
        ]
        blocks = sum(len(lease.slots) for lease in meant)
        for lease in meant:
            space.release(PINS, lease.number)
            self._asked.pop(lease.number, None)
        return len(meant), blocks


def _brought_up(space: Space, keys: list[BlockKey]) -> Generator[None, None, Pinned]:
    """Queue a prefetch of a prompt as far as there is room, and say what is there and what is on its way."""
    prefetching = space.foresight.prefetching
    needed = yield from prefetching.needed(keys)
    blocks_max = prefetching.blocks_max
    if needed.below and not prefetching.room(None):
        return Pinned(blocks_max=blocks_max, refusal=_taken("prefetches", blocks_max))
    left_out = needed.below - prefetching.begin(needed, Cause.OPERATOR)
    held = max(1, len(needed.run))  # blocks of all groups, which stand for those of the prompt
    return Pinned(
        blocks=needed.blocks * (len(needed.run) - left_out) // held,
        ready=needed.blocks * needed.ready // held,
        blocks_max=blocks_max,
    )


def _taken(what: str, blocks_max: int) -> str:
    return f"the {what} of this namespace take all of the {blocks_max} blocks that they may"


def space_of(spaces: SpaceTable, fingerprint: str) -> Space | None:
    """The space of the namespace with this fingerprint, in hex digits."""
    return next((space for namespace, space in spaces if namespace.fingerprint.hex() == fingerprint), None)


def _that_fit(space: Space, keys: list[BlockKey], room: int) -> list[BlockKey]:
    """The beginning of a prompt whose blocks of all groups are not more than there is room for."""
    if not space.layout.groups:
        return keys[:room]
    grouping = Grouping(space.layout.groups)
    boundaries = range(0, len(keys) + 1, grouping.step)
    return keys[
        : boundaries[bisect_right(boundaries, room, key=lambda each: grouping.run_length_max(each, 0)) - 1]
    ]


def _refusal(space: Space | None) -> str:
    """Why nothing can be held in this namespace; empty where it can."""
    if space is None:
        return "the manager holds no such namespace any more"
    if space.failure:
        return f"the namespace is off: {space.failure}"
    if space.options.staging:
        return "host memory is only the way to disk here (no host tier is configured): nothing can stay in it"
    return ""


def checked_keys(joined: bytes) -> list[BlockKey]:
    """The keys of a message. Raises ProtocolError."""
    if len(joined) % KEY_BYTES:
        raise ProtocolError(f"keys of {len(joined)} bytes cannot be served: a multiple of {KEY_BYTES}")
    return split_keys(joined)
