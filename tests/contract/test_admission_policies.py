"""The public admission contract, run on every admission policy that can be named in the settings, with and without a
write budget around it."""

from __future__ import annotations

import pytest

from kvbm.policy import AdmissionPolicy, DiskFilter, WriteBudget, admission_policies, make_admission
from kvbm.policy.admission.filter import ENTRIES_MAX
from kvbm.policy.admission.write_budget import BLOCKS_PER_DAY_MIN, DAY_S
from kvbm.testing.admission_contract import AdmissionContract
from rigs.property_tests import scale_examples

BLOCK_BYTES = 1 << 20
BUDGETS_BYTES = {
    "": 0,
    " within a budget": 1000 * BLOCK_BYTES,
    " within the smallest budget": BLOCKS_PER_DAY_MIN * BLOCK_BYTES,
}
ROUNDING_S = 1.0
"""A budget rounds in favour of the disk: it may take this much longer than a day to have room for a block again."""
FEW_ENTRIES = 4


class TestAdmissionPolicies(AdmissionContract):
    examples = scale_examples(40)

    @pytest.fixture(
        autouse=True, params=[name + budget for name in admission_policies() for budget in BUDGETS_BYTES]
    )
    def policy_name(self, request: pytest.FixtureRequest) -> None:
        self._name, _, budget = request.param.partition(" ")
        self._budget_bytes = BUDGETS_BYTES[request.param.removeprefix(self._name)]
        self.recovers_s = DAY_S + ROUNDING_S if budget else 0.0

    def make_policy(self, slot_count: int, now_s: float) -> AdmissionPolicy:
        made = make_admission(self._name, slot_count, now_s)
        return WriteBudget(made, self._budget_bytes, BLOCK_BYTES, now_s) if self._budget_bytes else made

    @pytest.mark.parametrize("call", ["offered", "hit"])
    def test_memory_stays_bounded(self, call: str) -> None:
        if self._name == "filter":
            pytest.skip("its bound is a million blocks; see below")
        super().test_memory_stays_bounded(call)


class TestFilterOfFewEntries(AdmissionContract):
    """The default, bounded so tightly that it is always full."""

    # From a full filter the newcomer goes first, until those that are there have faded; in KVBM's as well.
    offers_max = None

    def make_policy(self, slot_count: int, now_s: float) -> AdmissionPolicy:
        return DiskFilter(now_s, FEW_ENTRIES)


def test_the_default_filter_is_bounded_like_that() -> None:
    made = make_admission("filter", 1, 0.0)
    assert isinstance(made, DiskFilter)
    assert made._entries_max == ENTRIES_MAX == 1_000_000
