"""What a shared store costs in a month: what lies there, what is written and read, and every request."""

from __future__ import annotations

from math import ceil

import msgspec

from kvbm.settings.parse import GB
from kvbm.sim.serving.store import POLL_S, SWEEP_S, StoreRules, StoreUse
from kvbm.tiers.remote.sweep import LISTINGS_A_ROUND, PAGE_NAMES

ASSUMED_STORE_PRICE = 0.02
ASSUMED_PUT_PRICE = 0.005
ASSUMED_GET_PRICE = 0.0004
ASSUMED_EGRESS_PRICE = 0.0
"""Dollars for a GB in a month, for 1,000 writes, for 1,000 reads, for a GB read: round numbers, nobody's offer."""
MONTH_S = 30 * 86_400.0


class StorePrices(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars for 10^9 bytes in a month, for 1,000 requests, for 10^9 bytes read. Listings cost as much as writes.

    `assumed`: at least one of the first three is one of the numbers above.
    """

    per_gb: float = ASSUMED_STORE_PRICE
    per_1000_puts: float = ASSUMED_PUT_PRICE
    per_1000_gets: float = ASSUMED_GET_PRICE
    egress_per_gb: float = ASSUMED_EGRESS_PRICE
    assumed: bool = False


class StoreMonth(msgspec.Struct, frozen=True, kw_only=True):
    """A month of a store, if every hour is as those of the trace. Costs in dollars, the rest in bytes and requests.

    `puts` and `gets` move packs; `told_puts` and `told_gets` are what nodes say to one another through the store,
    listings and touches included. `again`: the share of the blocks written that others had written already.
    """

    stored_bytes: float
    written_bytes: float
    read_bytes: float
    puts: float
    gets: float
    told_puts: float
    told_gets: float
    blocks_a_put: float
    blocks_a_get: float
    again: float
    storage_cost: float
    put_cost: float
    get_cost: float
    egress_cost: float

    @property
    def cost(self) -> float:
        """All of it."""
        return self.storage_cost + self.put_cost + self.get_cost + self.egress_cost


def month_of(use: StoreUse, rules: StoreRules, prices: StorePrices, nodes: int, seconds: float) -> StoreMonth:
    """The month of which `use` is a part of so many seconds.

    What lies there in the end is that of a store that has run for long: as many packs go as come. By Little's law it is
    the bytes written a second, times how long each stays: until it was last used, and the TTL from then on.
    """
    assert seconds > 0.0
    times = MONTH_S / seconds
    stored = use.byte_s / seconds
    if rules.size_bytes is not None:
        stored = min(stored, float(rules.size_bytes))
    puts, gets = use.pack_puts * times, use.pack_gets * times
    blocks_a_put = use.written_blocks / use.pack_puts if use.pack_puts else 0.0
    packs = stored / (rules.block_bytes * blocks_a_put) if blocks_a_put else 0.0
    listings = MONTH_S / POLL_S + MONTH_S / SWEEP_S * min(LISTINGS_A_ROUND, ceil(packs / PAGE_NAMES))
    told_puts = (use.log_puts + use.touches) * times + nodes * listings
    told_gets = use.log_gets * times
    read_bytes = use.read_blocks * rules.block_bytes * times
    return StoreMonth(
        stored_bytes=stored,
        written_bytes=use.written_blocks * rules.block_bytes * times,
        read_bytes=read_bytes,
        puts=puts,
        gets=gets,
        told_puts=told_puts,
        told_gets=told_gets,
        blocks_a_put=blocks_a_put,
        blocks_a_get=use.read_blocks / use.pack_gets if use.pack_gets else 0.0,
        again=use.again / use.written_blocks if use.written_blocks else 0.0,
        storage_cost=stored / GB * prices.per_gb,
        put_cost=(puts + told_puts) / 1000 * prices.per_1000_puts,
        get_cost=(gets + told_gets) / 1000 * prices.per_1000_gets,
        egress_cost=read_bytes / GB * prices.egress_per_gb,
    )
