"""The host memory of a space: the arena, its index and the names of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvbm.block import BlockKey, Tier
from kvbm.manager.departed import Departed
from kvbm.manager.held_keys import HeldKeys
from kvbm.manager.names import EngineNames
from kvbm.manager.onboard import Rising
from kvbm.manager.pool import SlotPool
from kvbm.manager.slot_facts import SlotFacts
from kvbm.policy import make_policy
from kvbm.policy.last_copies import LastCopies
from kvbm.slices import SLICE_BLOCKS
from kvbm.tiers.host import HostArena


class SpaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a space. `staging`: host memory is only a bounded way to disk.

    `eviction` names the policy of both tiers; a staging area keeps no order but that of use.
    `brought_at_once`: blocks of a long run that a lookup queues for reading before it gives others their turn.
    `slice_blocks`: blocks that are indexed, committed or forgotten before others have theirs; `found_at_once`: those
    that a lookup looks for.
    `keeps_facts`: the tier below keeps what is said of blocks. `salt_share` is the part of an equal share of each tier
    that a tenant is sure of.
    """

    staging: bool = False
    eviction: str = "lru"
    in_flight_max: int = 64
    brought_at_once: int = 512
    slice_blocks: int = SLICE_BLOCKS
    found_at_once: int = 8192
    keeps_facts: bool = False
    salt_share: float = 0.5


DEFAULT_OPTIONS = SpaceOptions()


@dataclass(frozen=True, slots=True, eq=False)
class HostSide:
    """An arena with its index. `rising` has the run that fills each slot out of a tier below."""

    arena: HostArena
    names: EngineNames
    pool: SlotPool[BlockKey]
    facts: SlotFacts
    held: HeldKeys
    rising: dict[int, Rising] = field(default_factory=dict)


def make_host_side(
    arena: HostArena,
    options: SpaceOptions,
    departed: Departed,
    elsewhere: Callable[[BlockKey], bool] | None = None,
) -> HostSide:
    """The index of an empty arena; `departed` learns what leaves it. `elsewhere` says whether a block is believed to
    lie in a remote tier: such blocks go before others."""
    names = EngineNames(arena.slot_count)
    facts = SlotFacts(Tier.HOST, arena.slot_count, arena.layout.block_tokens)

    held = HeldKeys(Tier.HOST, arena.slot_count)

    def emptied(slots: Sequence[int], keys: Sequence[BlockKey], reason: str) -> None:
        arena.invalidate_all(slots)
        names.forget_all(slots)
        facts.emptied(slots)
        held.emptied(slots)
        departed.emptied(Tier.HOST, keys, reason)

    # Staged blocks need no order (`chained`): each lies on disk before it may go, and is found there.
    eviction, chained = ("lru", False) if options.staging else (options.eviction, True)
    policy = make_policy(eviction, arena.slot_count)
    if elsewhere is not None:
        policy = LastCopies(policy, lambda slot: elsewhere(pool.key_of(slot)))
    # Nobody owns a part of the way to disk: each block is there for a moment.
    share = 0.0 if options.staging else options.salt_share
    pool = SlotPool(Tier.HOST, arena.slot_count, policy, emptied, chained, share)
    held.pool = pool

    def committed(slots: Sequence[int]) -> None:
        facts.committed(slots)
        held.committed(slots)

    pool.on_committed = committed
    return HostSide(arena, names, pool, facts, held)
