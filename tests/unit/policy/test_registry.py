"""Policies by name, for eviction and for admission: our own, and those of installed packages."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.block import BlockKey
from kvbm.policy import LeafFirstLru, eviction_policies, make_policy
from kvbm.policy.admission.filter import AdmitAll, DiskFilter
from kvbm.policy.admission.ghost import GhostAdmission
from kvbm.policy.registry import ADMISSION, EVICTION, admission_policies, make_admission


def install(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, make: Callable[..., object], taken: str
) -> None:
    """An installed package with policies: a sound one, one that cannot be imported, one with a built-in's name."""
    module = types.ModuleType(f"extra_{kind}")
    module.make = make  # type: ignore[attr-defined]
    package = directory / f"extra_{kind}-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: extra-{kind}\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        f"[kvbm.{kind}_policies]\n"
        f"broken = extra_{kind}_absent:make\n"
        f"extra = extra_{kind}:make\n"
        f"{taken} = extra_{kind}:make\n"
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(directory)
    importlib.invalidate_caches()


class ExtraPolicy(LeafFirstLru):
    """That of the installed package."""


@pytest.fixture
def evictions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, monkeypatch, "eviction", ExtraPolicy, taken="lru")


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(
        tmp_path, monkeypatch, "admission", lambda slot_count, now_s: GhostAdmission(slot_count), taken="all"
    )


# ---- eviction


def test_the_built_in_eviction_policies_are_there() -> None:
    assert {"lru", "gittins"} == set(EVICTION.built_in) <= set(eviction_policies())


@pytest.mark.parametrize("name", EVICTION.built_in)
def test_a_built_in_policy_is_made_by_name(name: str) -> None:
    module = "gittins.policy" if name == "gittins" else name
    for made in (make_policy(name, 4), eviction_policies()[name](4)):
        assert type(made).__module__ == f"kvbm.policy.{module}"
        made.inserted((b"a" * 32, b"b" * 32), (0, 1), -1, 0.0)
        made.evictable((0, 1))
        assert made.victims(4, (), (), 0.0) == [1, 0]


@pytest.mark.usefixtures("evictions")
def test_an_installed_package_brings_a_policy() -> None:
    assert type(make_policy("extra", 4)) is ExtraPolicy
    assert list(eviction_policies())[-2:] == ["broken", "extra"]


@pytest.mark.usefixtures("evictions")
def test_a_package_cannot_take_a_built_in_name() -> None:
    assert type(make_policy("lru", 4)) is LeafFirstLru
    assert type(eviction_policies()["lru"](4)) is LeafFirstLru


@pytest.mark.usefixtures("evictions")
def test_a_broken_package_is_named_and_harms_nobody_else() -> None:
    with pytest.raises(
        ValueError, match=r"eviction policy 'broken': extra_eviction_absent:make cannot be imported"
    ):
        make_policy("broken", 4)
    assert type(make_policy("extra", 4)) is ExtraPolicy


def test_an_unknown_eviction_policy_is_refused_with_those_accepted() -> None:
    with pytest.raises(ValueError, match=r"eviction policy 'clock': not known; accepted: ") as refusal:
        make_policy("clock", 4)
    names = ", ".join(eviction_policies())
    expected = f"{names}, or a policy of an installed package (entry point kvbm.eviction_policies)"
    assert str(refusal.value).endswith(expected)


# ---- admission


def test_the_built_in_admission_policies_are_made_by_name() -> None:
    kinds = {"filter": DiskFilter, "all": AdmitAll, "ghost": GhostAdmission}
    assert set(kinds) == set(ADMISSION.built_in) <= set(admission_policies())
    for name, kind in kinds.items():
        made = make_admission(name, 8, 5.0)
        assert type(made) is kind
        assert made.offered(BlockKey(bytes(32)), 5.0) is (name == "all")
        assert made.offered(BlockKey(bytes(32)), 5.0)


@pytest.mark.usefixtures("admissions")
def test_an_installed_package_brings_an_admission_policy_and_takes_no_built_in_name() -> None:
    assert list(admission_policies())[-2:] == ["broken", "extra"]
    assert type(make_admission("extra", 4, 0.0)) is GhostAdmission
    assert type(make_admission("all", 4, 0.0)) is AdmitAll
    with pytest.raises(ValueError, match=r"'broken': extra_admission_absent:make cannot be imported"):
        make_admission("broken", 4, 0.0)


def test_an_unknown_admission_policy_is_refused_with_those_accepted() -> None:
    with pytest.raises(
        ValueError, match=r"admission policy 'clock': not known; accepted: filter, all, ghost"
    ):
        make_admission("clock", 4, 0.0)
