"""The events of an engine and of the tiers below it, as one account: what the consolidator publishes.

| mode | a store is published | a removal |
| --- | --- | --- |
| `dedup` | when the first tier holds the block, and routers know the block before it | when the last tier has lost it |
| `passthrough` | always, with its tier | always, with its tier |

Dynamo's router takes stores without a tier as the device's, and refuses one whose parent it does not know; stores in
tiers below may come in any order.

The log lines are those of NVIDIA's KVBM, which its tests read; so are the sources' names in them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash

from kvbm.block import Tier
from kvbm.events.wire import Cleared, Event, Removed, Stored, cleared_fields, removed_fields, stored_fields

log = logging.getLogger("kvbm.consolidator")

Mode = Literal["dedup", "passthrough"]
MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU_TIER1", Tier.DISK: "CPU_TIER2", Tier.REMOTE: "EXTERNAL"}
"""The names that the original publishes."""
SEED = 1337
"""Of the hash that Dynamo's router makes of a block's tokens."""
_SOURCES = {Tier.DEVICE: "Vllm", Tier.HOST: "Kvbm", Tier.DISK: "Kvbm", Tier.REMOTE: "Kvbm"}
_NAME_DIGITS = 16


_Place = tuple[int, int]
"""A block's name and the group of its layers."""


def sequence_hash(tokens: Sequence[int], before: int | None) -> int:
    """A block's hash as Dynamo's router makes it: of its tokens, and of the hash of the block before it."""
    own = xxhash.xxh3_64_intdigest(b"".join(each.to_bytes(4, "little") for each in tokens), SEED)
    if before is None:
        return own
    return xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + own.to_bytes(8, "little"), SEED)


@dataclass
class _Held:
    stored: Stored
    tiers: set[Tier] = field(default_factory=set)
    sequence_hash: int = 0
    told: bool = False
    """`dedup`: the store was published."""


class Merge:
    """The account of one engine, and what is to be published of it. A block is known by the engine's own name for it
    and the group of its layers, in all tiers, so that adapters and salts stay apart."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._held: dict[_Place, _Held] = {}
        self._orphans: dict[_Place, dict[_Place, None]] = {}
        """Blocks that are not told yet, by the one before them."""
        self._out: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Events that are to be published."""
        return len(self._out)

    def take_in(self, event: Event) -> None:
        """One event of the engine's stream, in order."""
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            self._remove(event)
        else:
            assert isinstance(event, Cleared)
            self.clear()

    def clear(self) -> None:
        """Nothing is held, or nothing is known any more."""
        log.debug("Clearing all %d blocks from tracker", len(self._held))
        self._held.clear()
        self._orphans.clear()
        self._out = [cleared_fields()]

    def drain(self) -> list[dict[str, Any]]:
        """What is to be published now."""
        out, self._out = self._out, []
        return out

    def snapshot(self) -> list[dict[str, Any]]:
        """All that is held, for one who hears nothing of what was: an empty cache, then every block after the one
        before it."""
        waiting, self._out = self._out, [cleared_fields()]
        self._orphans.clear()
        for held in self._held.values():
            held.told = False
        for place in list(self._parents_first()):
            if self._mode == "dedup":
                self._tell(place)
            else:
                held = self._held[place]
                self._out += [stored_fields(held.stored, MEDIUMS[tier]) for tier in sorted(held.tiers)]
        events, self._out = self._out, waiting
        return events

    def _parents_first(self) -> Iterator[_Place]:
        done: set[_Place] = set()
        for place in self._held:
            chain = []
            following: _Place | None = place
            while following is not None and following in self._held and following not in done:
                done.add(following)
                chain.append(following)
                before = self._held[following].stored.before
                following = (before, following[1]) if before is not None else None
            yield from reversed(chain)

    def _tell(self, place: _Place) -> None:
        """Publish a store once the block before it is told, and then those that waited for it."""
        waiting = [place]
        while waiting:
            place = waiting.pop()
            held = self._held[place]
            if held.told:
                continue
            before = _before(held)
            if before is not None and not (before in self._held and self._held[before].told):
                self._orphans.setdefault(before, {})[place] = None
                continue
            held.told = True
            self._out.append(stored_fields(held.stored, None))
            waiting += self._orphans.pop(place, ())

    def _forget_orphan(self, place: _Place, held: _Held) -> None:
        before = _before(held)
        if before in self._orphans:
            self._orphans[before].pop(place, None)
            if not self._orphans[before]:
                del self._orphans[before]

    def _store(self, event: Stored) -> None:
        place = (event.name, event.group)
        held = self._held.get(place)
        source = _SOURCES[event.tier]
        if held is None:
            before = self._held.get((event.before, event.group)) if event.before is not None else None
            digest = sequence_hash(event.tokens, before.sequence_hash if before is not None else None)
            self._held[place] = held = _Held(event, {event.tier}, digest)
            if self._mode == "dedup":
                self._tell(place)
            log.debug(
                "Block %s (seq_hash=%s) stored in first source %s, will publish STORE event (total tracked: %d)",
                event.name,
                digest,
                source,
                len(self._held),
            )
        elif event.tier not in held.tiers:
            held.tiers.add(event.tier)
            log.debug(
                "DEDUP: Block %s (seq_hash=%s) added to source %s (tier=%s; %s)",
                _short(event.name),
                held.sequence_hash,
                source,
                MEDIUMS[event.tier],
                _where(held),
            )
        if self._mode == "passthrough":
            self._out.append(stored_fields(event, MEDIUMS[event.tier]))

    def _remove(self, event: Removed) -> None:
        place = (event.name, event.group)
        held = self._held.get(place)
        source = _SOURCES[event.tier]
        if self._mode == "passthrough":
            self._out.append(removed_fields(event.name, MEDIUMS[event.tier], _group(held)))
        if held is None or event.tier not in held.tiers:
            log.debug("Block %s left source %s, which was not known to have it", event.name, source)
            return
        held.tiers.remove(event.tier)
        if held.tiers:
            log.debug(
                "Block %s (seq_hash=%s) removed from source %s, still in %s",
                _short(event.name),
                held.sequence_hash,
                source,
                _where(held),
            )
            return
        del self._held[place]
        if held.told:
            self._out.append(removed_fields(event.name, None, _group(held)))
        else:
            self._forget_orphan(place, held)
        log.debug(
            "Block %s (seq_hash=%s) removed from last source %s, will publish REMOVE event (total tracked: %d)",
            _short(event.name),
            held.sequence_hash,
            source,
            len(self._held),
        )


def _group(held: _Held | None) -> int:
    """The group to name with a removal: that of layers which routers must tell from full attention."""
    return (
        held.stored.group if held is not None and held.stored.more and "group_idx" in held.stored.more else 0
    )


def _before(held: _Held) -> _Place | None:
    """The block without which routers do not take this one. A window's own group begins anywhere."""
    before = held.stored.before
    return None if before is None or _group(held) else (before, held.stored.group)


def _short(name: int) -> str:
    return str(name)[:_NAME_DIGITS]


def _where(held: _Held) -> str:
    return "{" + ", ".join(f"{_SOURCES[tier]} {MEDIUMS[tier]}" for tier in sorted(held.tiers)) + "}"
