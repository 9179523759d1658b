"""What an indexer, a router's memory of who holds which block, believes of a manager that publishes KV events.

Only what was published counts, as for a router: blocks by topic (namespace) and tier, how they follow one another, and
what does not add up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbm.block import Tier
from kvbm.events.wire import Cleared, Event, Removed, Stored, WireError, events_in

BLOCKS_MAX = 4_000_000
"""Blocks that are kept, over all tiers: about 1.5 GB."""


@dataclass(frozen=True)
class TierBelieved:
    """One tier of a namespace. `roots` have no block before them; behind each of `chains` blocks comes no other one in
    the tier; the block before each of `orphans` is in no tier of the namespace, so that no prompt finds them."""

    namespace: str
    tier: Tier
    blocks: int
    roots: int
    chains: int
    orphans: int


@dataclass(frozen=True)
class Leading:
    """How much of a prompt is believed to be cached, from its first block on, in all tiers together and in each."""

    namespace: str
    prompt_blocks: int
    block_tokens: int
    blocks: int
    tiers: dict[Tier, int]


@dataclass(frozen=True)
class _Block:
    before: int | None
    tokens: bytes
    plain: bool
    """A prompt of tokens alone has it: no adapter, image or salt."""


@dataclass
class IndexerView:
    """Reads messages in the order in which they come. Bounded: where `full`, there is no room for more blocks."""

    messages: int = 0
    first: int | None = None
    last: int | None = None
    missing: int = 0
    """Messages that were numbered and did not come."""
    restarts: int = 0
    """Numbers that began anew."""
    twice: int = 0
    unknown_removals: int = 0
    cleared: int = 0
    unreadable: int = 0
    full: bool = False
    _held: dict[str, dict[Tier, dict[int, _Block]]] = field(default_factory=dict)
    _count: int = 0

    def read(self, topic: bytes, number: int, payload: bytes) -> None:
        """One message."""
        self.messages += 1
        if self.last is None:
            self.first = number
        elif number <= self.last:
            self.restarts += 1
        else:
            self.missing += number - self.last - 1
        self.last = number
        held = self._held.setdefault(topic.decode(errors="replace"), {})
        try:
            for event in events_in(payload):
                self._read(held, event)
        except (WireError, OverflowError):
            self.unreadable += 1

    def tiers(self) -> list[TierBelieved]:
        """What is believed, for every tier of which anything was ever published."""
        return [
            _believed(namespace, tier, blocks, held)
            for namespace, held in sorted(self._held.items())
            for tier, blocks in sorted(held.items())
        ]

    def count(self, namespace: str, tier: Tier) -> int:
        """The blocks that are believed to be in a tier."""
        return len(self._held.get(namespace, {}).get(tier, ()))

    def leading(self, tokens: Sequence[int]) -> list[Leading]:
        """Of this prompt, for every namespace with blocks. As routers do, the chain is followed by tokens alone."""
        return [
            _leading(namespace, held, tokens)
            for namespace, held in sorted(self._held.items())
            if any(held.values())
        ]

    def _read(self, held: dict[Tier, dict[int, _Block]], event: Event) -> None:
        if isinstance(event, Cleared):
            self.cleared += 1
            for blocks in held.values():
                self._count -= len(blocks)
                blocks.clear()
            return
        blocks = held.setdefault(event.tier, {})
        if isinstance(event, Removed):
            self._remove(blocks, event.name)
        else:
            self._store(blocks, event)

    def _remove(self, blocks: dict[int, _Block], name: int) -> None:
        if blocks.pop(name, None) is None:
            self.unknown_removals += 1
        else:
            self._count -= 1

    def _store(self, blocks: dict[int, _Block], event: Stored) -> None:
        if event.name in blocks:
            self.twice += 1
        elif self._count == BLOCKS_MAX:
            self.full = True
        else:
            plain = event.lora_name is None and not (event.more or {}).get("extra_keys")
            blocks[event.name] = _Block(event.before, array("I", event.tokens).tobytes(), plain)
            self._count += 1


def _believed(
    namespace: str, tier: Tier, blocks: dict[int, _Block], held: dict[Tier, dict[int, _Block]]
) -> TierBelieved:
    followed = {block.before for block in blocks.values()}
    orphans = sum(
        before is not None and not any(before in others for others in held.values())
        for before in (block.before for block in blocks.values())
    )
    return TierBelieved(
        namespace=namespace,
        tier=tier,
        blocks=len(blocks),
        roots=sum(block.before is None for block in blocks.values()),
        chains=sum(name not in followed for name in blocks),
        orphans=orphans,
    )


def _leading(namespace: str, held: dict[Tier, dict[int, _Block]], tokens: Sequence[int]) -> Leading:
    size = next(len(block.tokens) // 4 for blocks in held.values() for block in blocks.values())
    names = {
        (block.before, block.tokens): name
        for blocks in held.values()
        for name, block in blocks.items()
        if block.plain
    }
    found, before = list[int](), None
    for start in range(0, len(tokens) - size + 1, size):
        before = names.get((before, array("I", tokens[start : start + size]).tobytes()))
        if before is None:
            break
        found.append(before)
    return Leading(
        namespace=namespace,
        prompt_blocks=len(tokens) // size,
        block_tokens=size,
        blocks=len(found),
        tiers={tier: _from_the_start(blocks, found) for tier, blocks in sorted(held.items())},
    )


def _from_the_start(blocks: dict[int, _Block], names: Sequence[int]) -> int:
    return next((place for place, name in enumerate(names) if name not in blocks), len(names))
