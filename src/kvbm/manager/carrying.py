"""Carries the blocks of a space's host memory over to memory of another size, a piece in a turn.

The space serves meanwhile, out of the memory that it has. Blocks are copied by the manager's thread, which alone gives
slots away: a block that is resident before its copy is so after it. Where the new memory is smaller, as many slots as
are too many are taken out of use first, by the eviction policy, and their pages go back to the machine at once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from kvbm.block import BlockKey, BlockState, alike
from kvbm.clock import Clock
from kvbm.manager.host_side import HostSide
from kvbm.manager.leases import PINS
from kvbm.manager.pool import CAPACITY
from kvbm.manager.space import Space
from kvbm.tiers.host import HostArena

PIECE_BYTES = 1 << 19
"""What one turn copies, or one block where that is larger."""
PIECE_BLOCKS_MAX = 64
SCANNED_AT_ONCE = 1024
PASSES_MAX = 8
"""Blocks that are stored meanwhile are carried by another pass, at most so many."""


class Carrying:
    """One space on its way to another arena. Owned by the manager's thread.

    `steps` does the work; then either `finish` or `undo`. `before` counts the blocks at the start.
    """

    def __init__(self, space: Space, arena: HostArena, clock: Clock) -> None:
        """Takes the empty arena over. Raises for an installed policy that cannot be made of this size."""
        self.space = space
        self.before = space.host_pool.counts().resident
        self.dropped = 0
        """Blocks that a shrink took out of the present memory, before anything was carried."""
        self._clock = clock
        self._arena = arena
        self._cleared = space.cleared
        self._new = self._empty_host()
        self._piece_blocks = max(1, min(PIECE_BLOCKS_MAX, PIECE_BYTES // space.layout.block_bytes))
        self._full = False
        self._since_yield = 0

    @property
    def carried(self) -> int:
        """Blocks in the new memory."""
        return self._new.pool.counts().resident

    @property
    def goal(self) -> int:
        """About how many blocks will have been carried at the end, as it looks now."""
        return min(self.space.host_pool.counts().resident, self._arena.slot_count)

    @property
    def emptied_slots(self) -> bool:
        """Whether memory of slots was given back to the machine already."""
        return self.space.host_pool.withheld_count > 0

    def steps(self) -> Iterator[None]:
        """Carry the blocks over; each step is a piece."""
        yield from self._shrink()
        for pin in self.space.leases.of(PINS):  # first, while there is room
            yield from self._carry_all(pin.keys)
        for _ in range(PASSES_MAX):
            carried = yield from self._pass()
            if not carried or self._full:
                return

    def finish(self, pinned_share: float) -> int:
        """The space goes over to the new memory, of which pins keep at most that part. How many pins ended.

        No session of its engines may be left. Where something fails the space is off (`failure`), as after any
        failure of its own: half of it could be in one memory, half in the other.
        """
        self._restart_if_cleared()
        old = self.space.host_pool
        dropped = old.resident_but_not_in(self._new.pool)
        old.evicted[CAPACITY] += len(dropped)
        ended = self.space.replace_host(self._new, int(self._arena.slot_count * pinned_share))
        if self.space.arena is not self._arena:
            self._arena.close()
        self.space.departed.emptied(old.tier, dropped, True)
        return ended

    def undo(self) -> None:
        """Give the new memory up. Slots that were taken out of use serve again."""
        self.space.host_pool.give_back_withheld()
        self._arena.close()

    def _empty_host(self) -> HostSide:
        new = self.space.new_host(self._arena)
        if new.departures is not None:
            assert self.space.disk is not None
            new.departures.attach(new.pool, self.space.disk.offloader)
        return new

    def _shrink(self) -> Iterator[None]:
        """Take slots out of use until there are no more than the new memory has, or the others are in use."""
        old = self.space.host_pool
        while (excess := old.slot_count - old.withheld_count - self._arena.slot_count) > 0:
            evicted = old.evicted_count
            slots = old.withhold(min(excess, PIECE_BLOCKS_MAX), self._clock())
            self.dropped += old.evicted_count - evicted
            if not slots:
                return
            self.space.arena.discard(slots)
            yield

    def _pass(self) -> Generator[None, None, int]:
        """Carry over every block that is resident when its slot is looked at; how many they were."""
        old, carried = self.space.host_pool, 0
        for start in range(0, old.slot_count, SCANNED_AT_ONCE):
            yield
            slot, end = start, min(start + SCANNED_AT_ONCE, old.slot_count)
            while slot < end:
                self._restart_if_cleared()
                run = self._run_at(slot, end)
                slot += max(1, len(run))
                if run:
                    carried += yield from self._carry_all(self._chain_up_to(run[0])[:-1] + run)
                if self._full:
                    return carried
        return carried

    def _carry_all(self, chain: list[BlockKey]) -> Generator[None, None, int]:
        """Carry over consecutive blocks of a chain, a piece in a turn; how many they were."""
        carried, chain = 0, list(dict.fromkeys(chain))  # a hostile client's may have a block twice
        for start in range(0, len(chain), self._piece_blocks):
            piece = chain[start : start + self._piece_blocks]
            copied = 0 if self._new.pool.holds_any(piece) else self._carry(piece)
            carried, self._since_yield = carried + copied, self._since_yield + copied
            if self._full:
                break
            if self._since_yield >= self._piece_blocks:
                self._since_yield = 0
                yield
        return carried

    def _run_at(self, slot: int, end: int) -> list[BlockKey]:
        """The resident blocks from this slot on that are one chain and were not carried over yet; a piece at most."""
        old, run = self.space.host_pool, list[BlockKey]()
        for each in range(slot, min(end, slot + self._piece_blocks)):
            if old.state_of(each) is not BlockState.RESIDENT or (run and old.parent_of(each) != run[-1]):
                break
            key = old.key_of(each)
            if self._new.pool.holds(key):
                break
            run.append(key)
        return run

    def _chain_up_to(self, key: BlockKey) -> list[BlockKey]:
        """The block and those before it that were not carried over yet, first of the chain first."""
        old, new = self.space.host_pool, self._new.pool
        chain: dict[BlockKey, None] = {}  # a hostile client's chain may be a ring
        current: BlockKey | None = key
        while current is not None and current not in chain and not new.holds(current):
            slot = old.find(current)
            if slot is None:
                break
            chain[current] = None
            current = old.parent_of(slot)
        return list(chain)[::-1]

    def _carry(self, keys: list[BlockKey]) -> int:
        """Carry over consecutive blocks of a chain, as far as they are resident still and there is room; how many."""
        carried = 0
        while carried < len(keys) and (count := self._carry_alike(keys[carried:])):
            carried += count
            if self._full:
                break
        return carried

    def _carry_alike(self, keys: list[BlockKey]) -> int:
        """The first of them that are all of a tail, or all not."""
        old, new = self.space.host_pool, self._new.pool
        sources = list(map(int, old.find_leading(keys)))
        sources = sources[: alike(old.tails, sources)]
        room = new.free_count
        self._full = room < len(sources)
        sources = sources[:room]
        if not sources:
            return 0
        keys = keys[: len(sources)]
        tail = old.is_tail(sources[0])
        whose = old.favouring.tenant_of(sources[0])
        slots = new.reserve_chain(keys, old.parent_of(sources[0]), self._clock(), tail=tail, tenant=whose)
        for key, slot, source in zip(keys, slots, sources, strict=True):
            self._new.names.brought(slot, key, *self.space.engine_name(source, key))
            if (fact := self.space.facts.of(source)) is not None:
                self._new.facts.note(slot, fact)
        first = 0
        while first < len(slots):
            end = first + 1
            while end < len(slots) and (
                slots[end] - slots[first] == sources[end] - sources[first] == end - first
            ):
                end += 1
            self._arena.copy_slots(slots[first], self.space.arena, sources[first], end - first)
            first = end
        new.commit_all(slots)
        return len(slots)

    def _restart_if_cleared(self) -> None:
        """Blocks that an operator or an engine dropped meanwhile are not carried over."""
        if self._cleared != self.space.cleared:
            self._cleared = self.space.cleared
            self._new = self._empty_host()
