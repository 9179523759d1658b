"""A tier that drives policies and checks each of their answers, and traffic to put through it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from kvbm.policy import EvictionPolicy, PolicyFactory
from kvbm.policy.contract import ClientWord, insert_tail, request_tail, tell_hint

Path = tuple[int, ...]
"""The name of a block in tests: its content and that of the blocks before it, one number for each."""


def chain_of(path: Path) -> list[Path]:
    """Every block of the chain that ends with `path`, the first one first."""
    return [path[: place + 1] for place in range(len(path))]


def make_key(path: Path) -> Hashable:
    """The key of a block, 32 bytes as the manager's are."""
    return hashlib.sha256(repr(path).encode()).digest()


@dataclass
class HeldBlock:
    """The record of a `CheckedTier` about one slot that is not free."""

    path: Path
    parent: int
    resident: bool = False
    leases: int = 0
    children: set[int] = field(default_factory=set)


class CheckedTier:
    """Slots that two equal policies manage; every answer is checked against the contract.

    Like the manager's pool it leases the parent of the blocks that it makes room for. `admits_all` says that the
    policies take every newcomer as long as any block may be evicted. `now_s` is the time that the policies get; move it
    on, never back.
    """

    def __init__(
        self,
        make_policy: PolicyFactory,
        slot_count: int,
        admits_all: bool = False,
        key_of: Callable[[Path], Hashable] = make_key,
    ) -> None:
        self.slot_count = slot_count
        self.now_s = 1.0
        self.blocks: dict[int, HeldBlock] = {}
        self._policies: tuple[EvictionPolicy, ...] = (make_policy(slot_count), make_policy(slot_count))
        self._admits_all = admits_all
        self._key_of = key_of
        self._slot_of: dict[Path, int] = {}

    def find(self, path: Path) -> int:
        """The slot where the block is resident, or -1."""
        slot = self._slot_of.get(path, -1)
        return slot if slot >= 0 and self.blocks[slot].resident else -1

    def leased(self) -> frozenset[int]:
        """Slots with a lease."""
        return frozenset(slot for slot, block in self.blocks.items() if block.leases)

    def request(self, path: Path) -> None:
        """A request asks for the whole chain that ends with `path`."""
        chain = chain_of(path)
        keys, slots = self._keys(chain), tuple(map(self.find, chain))
        for policy in self._policies:
            policy.requested(keys, slots, self.now_s)

    def request_tail(self, path: Path, length: int) -> None:
        """The last request wants the last `length` blocks of `path` too, as a tail."""
        tail = chain_of(path)[-length:]
        keys, slots = self._keys(tail), tuple(map(self.find, tail))
        for policy in self._policies:
            request_tail(policy, keys, slots, self.now_s)

    def hint(self, path: Path, word: ClientWord) -> None:
        """The client says this of the request whose chain ended with `path`."""
        for policy in self._policies:
            tell_hint(policy, self._key_of(path), word, self.now_s)

    def finish(self, path: Path, output_tokens: int) -> None:
        """The request whose chain ended with `path` has ended."""
        for policy in self._policies:
            policy.finished(self._key_of(path), output_tokens, self.now_s)

    def reserve(self, path: Path, tail: bool = False) -> tuple[int, ...]:
        """Begin to fill the missing blocks of a chain, up to the next block that is here; the victims of that.

        With `tail` a policy that is a `KnowsTails` is told that they are one.
        """
        chain = chain_of(path)
        while chain and chain[0] in self._slot_of:
            del chain[0]
        held = [place for place, block in enumerate(chain) if block in self._slot_of]
        run = chain[: held[0]] if held else chain
        if not run:
            return ()
        parent = self._slot_of.get(run[0][:-1], -1)
        victims: tuple[int, ...] = ()
        if (needed := len(run) + len(self.blocks) - self.slot_count) > 0:
            pinned = [parent] if parent >= 0 and self.blocks[parent].resident else []
            self.lease(pinned)
            victims = self.evict(needed, run)
            self.unlease(pinned)
        self._fill(run[: self.slot_count - len(self.blocks)], parent, tail)
        return victims

    def commit(self, slots: Sequence[int]) -> None:
        """The slots are filled: resident from now on."""
        for slot in slots:
            self.blocks[slot].resident = True
        self._evictable(slots)

    def lease(self, slots: Sequence[int]) -> None:
        """Pin resident slots; pins add up."""
        for slot in slots:
            assert self.blocks[slot].resident
            self.blocks[slot].leases += 1

    def unlease(self, slots: Sequence[int]) -> None:
        """Undo one `lease` of each."""
        for slot in slots:
            self.blocks[slot].leases -= 1
        self._evictable([slot for slot in slots if not self.blocks[slot].leases])

    def remove(self, slots: Sequence[int]) -> None:
        """Empty slots that nobody leases, whether or not their continuations are here."""
        for slot in slots:
            self._forget(slot)
        for policy in self._policies:
            policy.removed(tuple(slots))

    def evict(self, needed: int, incoming: Sequence[Path] = ()) -> tuple[int, ...]:
        """Ask for victims, check them, and empty their slots."""
        keys, leased = self._keys(incoming), self.leased()
        answers = [list(policy.victims(needed, keys, leased, self.now_s)) for policy in self._policies]
        assert answers[0] == answers[1], f"the same calls were answered {answers[0]} and {answers[1]}"
        victims = answers[0]
        assert len(victims) <= needed, f"{len(victims)} victims where {needed} were needed"
        for slot in victims:
            assert slot in self.blocks, f"slot {slot} is free, or was chosen twice"
            block = self.blocks[slot]
            assert block.resident, f"slot {slot} is being filled"
            assert not block.leases, f"slot {slot} is leased"
            assert not block.children, (
                f"the continuation of slot {slot} is still in slot {min(block.children)}"
            )
            self._forget(slot)
        if len(victims) < needed and (self._admits_all or not incoming):
            spared = [slot for slot in self.blocks if self._may_go(slot)]
            assert not spared, f"{len(victims)} victims of {needed}, though slot {min(spared)} may go"
        return tuple(victims)

    def empty(self) -> None:
        """End all fillings and leases, and evict everything."""
        self.commit([slot for slot, block in self.blocks.items() if not block.resident])
        while leased := self.leased():
            self.unlease(sorted(leased))
        self.evict(self.slot_count)
        assert not self.blocks, f"slot {min(self.blocks)} is never given up"

    def _keys(self, chain: Sequence[Path]) -> tuple[Hashable, ...]:
        return tuple(map(self._key_of, chain))

    def _may_go(self, slot: int) -> bool:
        block = self.blocks[slot]
        return block.resident and not block.leases and not block.children

    def _fill(self, run: Sequence[Path], parent: int, tail: bool) -> None:
        if not run:
            return
        slots = [slot for slot in range(self.slot_count) if slot not in self.blocks][: len(run)]
        for policy in self._policies:
            if tail:
                insert_tail(policy, self._keys(run), tuple(slots), parent, self.now_s)
            else:
                policy.inserted(self._keys(run), tuple(slots), parent, self.now_s)
        for path, slot in zip(run, slots, strict=True):
            self.blocks[slot] = HeldBlock(path, parent)
            self._slot_of[path] = slot
            if parent >= 0:
                self.blocks[parent].children.add(slot)
            parent = slot

    def _evictable(self, slots: Sequence[int]) -> None:
        for policy in self._policies:
            policy.evictable(tuple(slots))

    def _forget(self, slot: int) -> None:
        block = self.blocks.pop(slot)
        del self._slot_of[block.path]
        if block.parent >= 0:
            self.blocks[block.parent].children.discard(slot)
        for child in block.children:
            self.blocks[child].parent = -1


def traffic(tier: CheckedTier, seed: int, request_count: int) -> Iterator[tuple[int, ...]]:
    """Conversations that grow turn by turn and are given up, with leases, faults and tidying up; the victims of each.

    The same for equal seeds. Every conversation is new, so a policy must bound its memory of the past.
    """
    chance = random.Random(seed)
    talks: list[Path] = []
    leases: list[list[int]] = []
    for number in range(request_count):
        tier.now_s += chance.choice((0.0, 0.5, 30.0))
        if len(talks) < 2 or chance.random() < 0.2:
            shared = chance.choice(((), (-1,), (-1, -2)))
            talks.append((*shared, number))
        talk = chance.randrange(len(talks))
        talks[talk] += tuple(range(chance.randrange(4)))
        path = talks[talk]
        tier.request(path)
        hits = [slot for slot in map(tier.find, chain_of(path)) if slot >= 0]
        tier.lease(hits)
        leases.append(hits)
        yield tier.reserve(path)
        if chance.random() < 0.7:
            tier.commit([slot for slot, block in tier.blocks.items() if not block.resident])
        while len(leases) > 3:
            tier.unlease(leases.pop(chance.randrange(len(leases))))
        tier.finish(path, chance.randrange(500))
        removable = [slot for slot, block in tier.blocks.items() if not block.leases]
        if removable and chance.random() < 0.1:
            tier.remove([chance.choice(removable)])
        if len(talks) > 12 or len(path) > 12:
            del talks[chance.randrange(len(talks)) if len(path) <= 12 else talk]
