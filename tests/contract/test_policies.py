"""The public policy contract, run on every eviction policy that can be named in the settings."""

from __future__ import annotations

import pytest

from kvbm.policy import EvictionPolicy, eviction_policies, make_policy
from kvbm.testing.policy_contract import PolicyContract
from rigs.property_tests import scale_examples

ADMITTING = {"lru"}
"""Those that take every newcomer."""
GROWTH_BYTES_MAX = {"gittins": 1 << 24}
"""Where a policy learns more than the first thousand requests say: its history's bound is not the tier's size."""


class TestEvictionPolicies(PolicyContract):
    examples = scale_examples(100)

    @pytest.fixture(autouse=True, params=list(eviction_policies()))
    def policy_name(self, request: pytest.FixtureRequest) -> None:
        self._name = request.param
        self.admits_all = self._name in ADMITTING
        self.growth_bytes_max = GROWTH_BYTES_MAX.get(self._name, PolicyContract.growth_bytes_max)

    def make_policy(self, slot_count: int) -> EvictionPolicy:
        return make_policy(self._name, slot_count)
