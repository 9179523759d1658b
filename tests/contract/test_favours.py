"""The policy contract, run on every built-in eviction policy with blocks favoured in it."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence

import pytest

from kvbm.policy import EvictionPolicy, make_policy
from kvbm.policy.contract import knows_hints
from kvbm.policy.favours import Favours
from kvbm.policy.registry import EVICTION
from kvbm.testing.policy_contract import PolicyContract
from rigs.property_tests import scale_examples

ADMITTING = {"lru"}
"""Those that take every newcomer."""
GROWTH_BYTES_MAX = {"gittins": 1 << 24}
TENANTS = ("", "one", "two")


class Busy(Favours):
    """Requests of three tenants in turn, each of which retains half of what it asks for for a while.

    Room is made for nobody in particular: then no favour keeps a block that nothing else can go for.
    """

    turn = 0

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        self.turn += 1
        self.asked_by(TENANTS[self.turn % 3], now_s)
        half = len(keys) // 2 + 1
        self.retain(keys[:half], slots[:half], now_s + 20.0, 51 + self.turn % 4, now_s)
        super().requested(keys, slots, now_s)

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        self.stored_for(TENANTS[self.turn % 3], parent)
        super().inserted(keys, slots, parent, now_s)

    def victims(
        self, needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float
    ) -> list[int]:
        """Room for each tenant in turn: a block that is kept from others may go for its own tenant."""
        chosen, gone = list[int](), True
        while gone:
            gone = False
            for tenant in TENANTS:
                self.stored_for(tenant, -1)
                found = super().victims(needed - len(chosen), incoming, leased, now_s)
                chosen += found
                gone = gone or bool(found)
        return chosen


@pytest.mark.slow
class TestFavours(PolicyContract):
    examples = scale_examples(30)

    @pytest.fixture(autouse=True, params=list(EVICTION.built_in))
    def policy_name(self, request: pytest.FixtureRequest) -> None:
        self._name = request.param
        self.admits_all = self._name in ADMITTING
        self.growth_bytes_max = GROWTH_BYTES_MAX.get(self._name, 2 * PolicyContract.growth_bytes_max)

    def make_policy(self, slot_count: int) -> EvictionPolicy:
        return Busy(make_policy(self._name, slot_count), slot_count, 1.0)


@pytest.mark.parametrize("name", list(EVICTION.built_in))
def test_it_knows_what_the_inner_policy_knows(name: str) -> None:
    inner = make_policy(name, 8)
    assert knows_hints(Favours(inner, 8, 0.5)) == knows_hints(inner)
