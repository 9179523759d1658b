"""When blocks of a pool are favoured: its policy is put into `policy.favours` with the second tenant, or with the first
retained block. Until then it is asked as it is, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvbm.block import NO_SLOT, BlockState
from kvbm.policy import EvictionPolicy
from kvbm.slices import SLICE_BLOCKS, batches

if TYPE_CHECKING:
    from kvbm.policy.favours import Favours
    from kvbm.policy.retained import Retention
    from kvbm.policy.shares import Slots


class Pool(Protocol):
    """The part of a pool that this needs; `pool.SlotPool` is one."""

    policy: EvictionPolicy
    slot_count: int

    def slots_in(self, state: BlockState) -> list[int]:
        """All slots in this state."""

    def slots_of(self, keys: Iterable[Any]) -> list[int]:
        """The slot that holds each of these blocks, resident or being filled; NO_SLOT for one that is not held."""

    def used_slots(self) -> Slots:
        """All slots that the policy knows."""


class Favouring:
    """Who asks for and stores blocks of a pool, and what is retained there. `share` is as in `Favours`."""

    def __init__(self, pool: Pool, share: float) -> None:
        self._pool = pool
        self._share = share
        self.favours: Favours | None = None
        """The pool's policy, once there is something to favour."""
        # The only tenant so far, whose all blocks are then, unless some were found after a restart.
        self._tenant: str | None = None
        self._asked_s = 0.0
        self._recovered = False

    @property
    def retained_count(self) -> int:
        """Blocks in the pool that are retained."""
        return 0 if self.favours is None else len(self.favours.retained.here)

    @property
    def tenant_counts(self) -> tuple[int, int]:
        """How many tenants are active, and how many of them hold less than they are sure of; zeros where all blocks are
        one tenant's."""
        shares = None if self.favours is None else self.favours.shares
        return (0, 0) if shares is None else (shares.active_count, shares.poor_count)

    def asks(self, tenant: str | None, now_s: float) -> None:
        """A request of the tenant comes; None: of nobody that is known."""
        if (favours := self._obtained(tenant)) is not None:
            favours.asked_by(tenant, now_s)
        self._asked_s = now_s

    def stores(self, tenant: str | None, parent: int) -> None:
        """Blocks of the tenant come, behind the one in slot `parent`; without a name, those of that block's."""
        if (favours := self._obtained(tenant)) is not None:
            favours.stored_for(tenant, parent)

    def recovers(self, found: bool) -> None:
        """Blocks were found of which nobody knows whose they are, until they are asked for."""
        self._recovered = found

    def tenant_of(self, slot: int) -> str | None:
        """Whose block is in a slot that is not free; None where nobody knows."""
        if self.favours is not None:
            return self.favours.tenant_of(slot)
        return None if self._recovered else self._tenant

    def retain(
        self,
        keys: Sequence[Hashable],
        slots: Sequence[int],
        tenant: str,
        until_s: float,
        priority: int,
        now_s: float,
    ) -> int:
        """Prefer these blocks until then; of how many that can be promised."""
        if self.favours is None:
            self.favours = self._put_on()
        self.favours.asked_by(tenant, now_s)
        return self.favours.retain(keys, slots, until_s, priority, now_s)

    def retains(self, slot: int, now_s: float) -> bool:
        """Whether the block in a slot is retained."""
        kept = self.favours.retained.here.get(slot) if self.favours is not None else None
        return kept is not None and kept.until_s > now_s

    def retained_entries(self) -> list[Retention]:
        """What is retained, here or not."""
        return [] if self.favours is None else list(self.favours.retained.all())

    def end_absent(self, entries: Sequence[Retention]) -> None:
        """Those of them that are not here will not come back: all were dropped, and keys have changed."""
        if self.favours is not None:
            self.favours.retained.end_absent(entries)

    def taking_over(self, other: Favouring, now_s: float, at_once: int = SLICE_BLOCKS) -> Iterator[None]:
        """Who was active in another pool, whose blocks have come here, is active, and what was retained is. In slices
        of so many blocks."""
        if (before := other.favours) is None:
            return
        for tenant, asked_s in before.shares.active():
            self.asks(tenant, asked_s)
        for some in batches(list(before.retained.all()), at_once):
            for each in some:
                whose = before.shares.name(each.tenant)
                if whose is not None and each.until_s > now_s:
                    self.favours = self.favours or self._put_on()
                    self.favours.stored_for(whose, NO_SLOT)
                    slots = self._pool.slots_of((each.key,))
                    self.favours.retain((each.key,), slots, each.until_s, each.priority, now_s)
            yield

    def check(self, used: int) -> None:
        """Assert that every slot that is not free, of which there are `used`, counts for somebody, once."""
        if self.favours is not None:
            self.favours.check(used)

    def _obtained(self, tenant: str | None) -> Favours | None:
        if self.favours is None and tenant is not None and tenant != self._tenant and self._share:
            if self._tenant is not None or (self._recovered and tenant):
                self.favours = self._put_on()
            else:
                self._tenant = tenant
        return self.favours

    def _put_on(self) -> Favours:
        from kvbm.policy.favours import Favours

        pool, owner = self._pool, self._tenant
        filling = pool.slots_in(BlockState.FILLING)
        whose = None if self._recovered else owner
        favours = Favours(pool.policy, pool.slot_count, self._share, filling, pool.used_slots(), whose)
        if owner is not None:
            favours.asked_by(owner, self._asked_s)
        pool.policy = favours
        return favours
