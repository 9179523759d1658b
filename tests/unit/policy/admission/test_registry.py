"""Ghost lists, the write budget, and admission policies by name."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.block import BlockKey
from kvbm.policy.admission.filter import AdmitAll, DiskFilter
from kvbm.policy.admission.ghost import GHOSTS_MAX, GHOSTS_PER_SLOT, GhostAdmission
from kvbm.policy.admission.write_budget import DAY_S, WriteBudget
from kvbm.policy.registry import ADMISSION, admission_policies, make_admission


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


# ---- ghosts


def test_a_block_enters_from_the_second_offer_on() -> None:
    ghosts = GhostAdmission(4)
    assert not ghosts.offered(key(1), 0.0)
    assert ghosts.offered(key(1), 1e9), "time does not matter"
    assert ghosts.offered(key(1), 1e9), "it may be offered again when its write came to nothing"
    ghosts.hit(key(2), 0.0)
    assert not ghosts.offered(key(2), 0.0), "a hit is of a block that is on disk"


def test_the_list_is_bounded_and_forgets_what_was_offered_longest_ago() -> None:
    ghosts = GhostAdmission(2)
    size = 2 * GHOSTS_PER_SLOT
    for number in range(size):
        assert not ghosts.offered(key(number), 0.0)
    assert ghosts.offered(key(0), 0.0)  # the latest now
    assert not ghosts.offered(key(100), 0.0)
    assert len(ghosts) == size
    assert ghosts.offered(key(0), 0.0)
    assert not ghosts.offered(key(1), 0.0), "it had to go for 100"


def test_the_list_of_a_huge_tier_is_bounded_too() -> None:
    ghosts = GhostAdmission(GHOSTS_MAX)
    assert ghosts._ghosts_max == GHOSTS_MAX


# ---- the budget


def test_the_budget_is_a_24th_at_once_and_the_rest_over_the_day() -> None:
    budget = WriteBudget(AdmitAll(), bytes_per_day=240, block_bytes=1)
    assert [budget.offered(key(i), 0.0) for i in range(11)] == [True] * 10 + [False]
    assert budget.refused_last
    # 230 bytes over the day: one every 376 seconds.
    assert not budget.offered(key(1), DAY_S / 230 * 0.99)
    assert budget.offered(key(1), DAY_S / 230 * 1.01)
    assert not budget.refused_last
    assert [budget.offered(key(i), DAY_S) for i in range(11)] == [True] * 10 + [False], (
        "it is saved up no further"
    )


@settings(max_examples=200)
@given(
    st.integers(2, 100),
    st.integers(1, 7),
    st.lists(st.sampled_from([0.0, 1.0, 600.0, 3600.0, 40_000.0]), max_size=200),
)
def test_no_day_exceeds_the_budget(blocks: int, block_bytes: int, pauses: list[float]) -> None:
    budget, now_s, written = WriteBudget(AdmitAll(), blocks * block_bytes, block_bytes), 0.0, []
    for pause_s in pauses:
        now_s += pause_s
        if budget.offered(key(0), now_s):
            written.append(now_s)
    for first_s in written:
        assert (
            sum(block_bytes for at_s in written if first_s <= at_s < first_s + DAY_S) <= blocks * block_bytes
        )


def test_the_policy_inside_counts_what_the_budget_refuses() -> None:
    budget = WriteBudget(DiskFilter(), bytes_per_day=2, block_bytes=1)
    assert not budget.offered(key(1), 0.0)
    assert not budget.refused_last, "the filter refused it"
    assert budget.offered(key(1), 0.0)
    assert not budget.offered(key(2), 0.0)
    assert not budget.offered(key(2), 0.0)
    assert budget.refused_last
    assert not budget.offered(key(3), DAY_S)
    budget.hit(key(3), DAY_S)
    assert budget.offered(key(3), DAY_S), "a hit counts inside"


def test_what_is_not_written_is_given_back() -> None:
    budget = WriteBudget(AdmitAll(), bytes_per_day=48, block_bytes=1)
    assert budget.offered(key(1), 0.0)
    for _ in range(9):
        budget.refund()
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False], "never more than the burst"


def test_a_budget_that_could_never_refill_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"bytes_per_day=19 cannot be used: at least 20, 2 blocks of 10 bytes"
    ):
        WriteBudget(AdmitAll(), bytes_per_day=19, block_bytes=10)
    budget = WriteBudget(AdmitAll(), bytes_per_day=20, block_bytes=10)
    assert [budget.offered(key(1), at_s) for at_s in (0.0, 0.0, DAY_S, DAY_S)] == [True, False, True, False]


# ---- by name


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package with policies: a sound one, one that cannot be imported, one with a built-in's name."""
    package = tmp_path / "extra_admissions-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-admissions\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[kvbm.admission_policies]\n"
        "broken = extra_admissions_absent:make\n"
        "extra = extra_admissions:make\n"
        "all = extra_admissions:make\n"
    )
    module = types.ModuleType("extra_admissions")
    module.make = lambda slot_count, now_s: GhostAdmission(slot_count)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "extra_admissions", module)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def test_the_built_in_policies_are_made_by_name() -> None:
    kinds = {"filter": DiskFilter, "all": AdmitAll, "ghost": GhostAdmission}
    assert set(kinds) == set(ADMISSION.built_in) <= set(admission_policies())
    for name, kind in kinds.items():
        made = make_admission(name, 8, 5.0)
        assert type(made) is kind
        assert made.offered(key(1), 5.0) is (name == "all")
        assert made.offered(key(1), 5.0)


@pytest.mark.usefixtures("plugin")
def test_an_installed_package_brings_a_policy_and_takes_no_built_in_name() -> None:
    assert list(admission_policies())[-2:] == ["broken", "extra"]
    assert type(make_admission("extra", 4, 0.0)) is GhostAdmission
    assert type(make_admission("all", 4, 0.0)) is AdmitAll
    with pytest.raises(ValueError, match=r"'broken': extra_admissions_absent:make cannot be imported"):
        make_admission("broken", 4, 0.0)


def test_an_unknown_name_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(
        ValueError, match=r"admission policy 'clock': not known; accepted: filter, all, ghost"
    ):
        make_admission("clock", 4, 0.0)
