"""How large each table of a manager is, and can become: the memory of a manager beside its tiers.

Every table has a bound on its entries. The bytes of an entry are measured (CPython 3.11, x86-64) and rounded up; an
entry of several objects counts all that it alone keeps alive. `tests/unit/manager/test_table_sizes.py` holds the sum
against the memory that a load takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvbm.admin_protocol import TableReport
from kvbm.manager.deadlines import KEYS_MAX as DEADLINES_MAX
from kvbm.manager.departed import GENERATION_BLOCKS, GENERATIONS
from kvbm.manager.history import PROMPTS_MAX, REQUESTS_MAX, VARIANTS_MAX
from kvbm.manager.offload import QUEUE_BLOCKS_MAX
from kvbm.manager.pool import SlotPool
from kvbm.manager.prefix_heat import CHAIN_BLOCKS_MAX, HEADS_MAX
from kvbm.manager.sessions import SESSION_KEYS_MAX, SESSIONS_MAX
from kvbm.manager.usage import PENDING_KEYS_MAX
from kvbm.policy.admission.filter import ENTRIES_MAX
from kvbm.policy.admission.ghost import GHOSTS_MAX

if TYPE_CHECKING:
    from kvbm.manager.history import History
    from kvbm.manager.space import Space

_KEY_BYTES = 65 + 104
"""A key and its entry in a dictionary."""
TIERS_OF_FATES = 3


def space_tables(space: Space) -> Iterator[TableReport]:
    """The tables of one namespace."""
    for pool in space.pools:
        yield from _pool_tables(pool)
    most = TIERS_OF_FATES * GENERATIONS * GENERATION_BLOCKS
    yield _table("blocks that left a tier", len(space.departed), most, _KEY_BYTES)
    yield _table("blocks to be told to policies", space.usage.pending_keys, PENDING_KEYS_MAX, _KEY_BYTES)
    yield _table("deadlines of blocks", len(space.retaining.deadlines), DEADLINES_MAX, 120)
    sessions = space.foresight.sessions
    yield _table("named sessions", sessions.count, SESSIONS_MAX, 1500)
    yield _table("blocks of named sessions", sessions.key_count, SESSION_KEYS_MAX, 33)
    yield _table("shared prefixes", len(space.heat), HEADS_MAX, 400)
    yield _table("blocks of shared prefixes", space.heat.block_count, HEADS_MAX * CHAIN_BLOCKS_MAX, 33)
    slots = space.host_pool.slot_count
    yield _table("reserved blocks", sum(len(r.slots) for r in space.reservations), slots, 2 * _KEY_BYTES)
    if space.disk is not None:
        yield _table(
            "blocks to be written to disk", space.disk.queued_count, 2 * QUEUE_BLOCKS_MAX, _KEY_BYTES
        )
        yield from _admission_tables(space.disk.admission)


def history_tables(history: History) -> Iterator[TableReport]:
    """The memory behind `kvbm why`."""
    yield _table("latest requests", len(history), REQUESTS_MAX, 1600)
    yield _table("beginnings of prompts", history.prompt_count, PROMPTS_MAX * VARIANTS_MAX, 600)


def _pool_tables(pool: SlotPool[Any]) -> Iterator[TableReport]:
    tier, slots = pool.tier.name.lower(), pool.slot_count
    yield _table(f"blocks in {tier}", slots - pool.free_count, slots, _KEY_BYTES + 64)
    policy: Any = pool.policy
    favours = pool.favouring.favours
    if favours is not None:
        most = favours.retained.budget
        yield _table(f"retained blocks in {tier}", len(favours.retained), most, 450)
    while hasattr(policy, "inner"):
        policy = policy.inner
    if (tree := getattr(policy, "tree", None)) is not None and hasattr(policy, "history_blocks_max"):
        # The tree may hold one request more than its bounds, until the next one comes.
        runs, blocks = policy.history_runs_max + slots, policy.history_blocks_max + slots
        yield _table(f"prefixes known to the policy of {tier}", len(tree), runs, 250)
        yield _table(f"blocks known to the policy of {tier}", tree.live_blocks, blocks, 24)


def _admission_tables(admission: Any) -> Iterator[TableReport]:
    while hasattr(admission, "inner"):
        admission = admission.inner
    if hasattr(admission, "__len__"):
        most = {"DiskFilter": ENTRIES_MAX, "GhostAdmission": GHOSTS_MAX}.get(type(admission).__name__)
        if most is not None:
            yield _table("blocks offered to disk", len(admission), most, _KEY_BYTES + 16)


def _table(name: str, count: int, most: int, entry_bytes: int) -> TableReport:
    return TableReport(name=name, count=count, most=most, entry_bytes=entry_bytes)
