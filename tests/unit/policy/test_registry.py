"""Eviction policies by name, our own and those of installed packages."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from kvbm.policy import LeafFirstLru, S3Fifo, eviction_policies, make_policy
from kvbm.policy.registry import EVICTION


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package with policies: a sound one, one that cannot be imported, one with a built-in's name."""
    package = tmp_path / "extra_policies-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-policies\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[kvbm.eviction_policies]\n"
        "broken = extra_policies_absent:Policy\n"
        "extra = extra_policies:Policy\n"
        "lru = extra_policies:Policy\n"
    )
    module = types.ModuleType("extra_policies")
    module.Policy = type("Policy", (LeafFirstLru,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "extra_policies", module)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def test_the_built_in_policies_are_there() -> None:
    assert (
        {"lru", "s3fifo", "sieve", "arc", "tinylfu", "gdsf"}
        <= set(EVICTION.built_in)
        <= set(eviction_policies())
    )


@pytest.mark.parametrize("name", EVICTION.built_in)
def test_a_built_in_policy_is_made_by_name(name: str) -> None:
    module = "gittins.policy" if name == "gittins" else name
    for made in (make_policy(name, 4), eviction_policies()[name](4)):
        assert type(made).__module__ == f"kvbm.policy.{module}"
        made.inserted((b"a" * 32, b"b" * 32), (0, 1), -1, 0.0)
        made.evictable((0, 1))
        assert made.victims(4, (), (), 0.0) == [1, 0]


@pytest.mark.usefixtures("plugin")
def test_an_installed_package_brings_a_policy() -> None:
    assert type(make_policy("extra", 4)) is sys.modules["extra_policies"].Policy
    assert list(eviction_policies())[-2:] == ["broken", "extra"]


@pytest.mark.usefixtures("plugin")
def test_a_package_cannot_take_a_built_in_name() -> None:
    assert type(make_policy("lru", 4)) is LeafFirstLru
    assert type(eviction_policies()["lru"](4)) is LeafFirstLru


@pytest.mark.usefixtures("plugin")
def test_a_broken_package_is_named_and_harms_nobody_else() -> None:
    with pytest.raises(
        ValueError, match=r"eviction policy 'broken': extra_policies_absent:Policy cannot be imported"
    ):
        make_policy("broken", 4)
    assert isinstance(make_policy("s3fifo", 4), S3Fifo)


def test_an_unknown_name_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"eviction policy 'clock': not known; accepted: ") as refusal:
        make_policy("clock", 4)
    assert str(refusal.value).endswith(", ".join(eviction_policies()))
