"""Policies by name as a user gives them: what cannot be used is refused before any tier is made."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import kvbm
from kvbm.errors import SettingsError
from kvbm.manager.choices import bound_writes, choose_admission, refuse_eviction
from kvbm.policy import AdmitAll, GhostAdmission, LeafFirstLru, WriteBudget
from rigs.manager import KEYS, ManagerBench

LAYOUT = kvbm.BlockLayout(block_tokens=8, shard_bytes=4096)


class OnlySmall(LeafFirstLru):
    """A policy that can be made for a tier of one slot, and for no other."""

    def __init__(self, slot_count: int) -> None:
        if slot_count > 1:
            raise RuntimeError("too large for me")
        super().__init__(slot_count)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package whose policies cannot be imported, cannot be made, or not of every size."""
    package = tmp_path / "packages" / "odd_policies-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-policies\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[kvbm.eviction_policies]\nabsent = odd_policies_absent:Policy\nonly_small = odd_policies:OnlySmall\n"
        "[kvbm.admission_policies]\nabsent = odd_policies_absent:Policy\nno_policy = odd_policies:nothing\n"
    )
    module = types.ModuleType("odd_policies")
    module.OnlySmall, module.nothing = OnlySmall, None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "odd_policies", module)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    importlib.invalidate_caches()


def test_built_in_names_are_taken() -> None:
    for name in ("gittins", "lru"):
        refuse_eviction("eviction", name)
    for name in ("filter", "all", "ghost"):
        choose_admission("admission", name, 1, 0.0)
    ghosts = choose_admission("admission", "ghost", 7, 0.0)
    assert isinstance(ghosts, GhostAdmission)
    for key in KEYS[:20]:
        ghosts.offered(key, 0.0)
    assert len(ghosts) == 14


def test_unknown_names_are_refused_with_what_is_accepted() -> None:
    with pytest.raises(
        SettingsError,
        match=r"='sieve' cannot be used: one of: gittins, lru, .*kvbm.eviction_policies\)",
    ):
        refuse_eviction("eviction", "sieve")
    with pytest.raises(SettingsError, match=r"admission='clock' cannot be used: one of: filter, all, ghost"):
        choose_admission("admission", "clock", 1, 0.0)


@pytest.mark.usefixtures("plugin")
def test_policies_of_packages_that_cannot_be_made_are_refused() -> None:
    refuse_eviction("eviction", "only_small")
    reason = r"cannot be used: a policy that can be made \(.*odd_policies_absent:Policy cannot be imported"
    with pytest.raises(SettingsError, match=f"eviction='absent' {reason}"):
        refuse_eviction("eviction", "absent")
    with pytest.raises(SettingsError, match=f"admission='absent' {reason}"):
        choose_admission("admission", "absent", 1, 0.0)
    with pytest.raises(SettingsError, match=r"admission='no_policy' .*not callable"):
        choose_admission("admission", "no_policy", 1, 0.0)


def test_a_budget_is_shared_out_and_a_share_must_be_of_use() -> None:
    inner = AdmitAll()
    assert bound_writes("budget", 0, inner, 10, 0.0) is inner
    share = bound_writes("budget", 480, inner, 1, 0.0, share=2)
    assert isinstance(share, WriteBudget)
    assert [share.spend(0.0) for _ in range(11)] == [True] * 10 + [False], "a 24th of half of it"
    with pytest.raises(SettingsError, match=r"budget=39 .* at least 40 bytes: .* for each of 2 namespaces"):
        bound_writes("budget", 39, inner, 10, 0.0, share=2)
    with pytest.raises(SettingsError, match=r"budget=-1 .* at least 20 bytes: 2 blocks of 10 bytes$"):
        bound_writes("budget", -1, inner, 10, 0.0)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("variable", "setting"),
    [("DYN_KVBM_EVICTION", "eviction"), ("DYN_KVBM_DISK_ADMISSION", "disk_admission")],
)
def test_a_manager_refuses_them_before_an_engine_comes(
    make_manager: Callable[..., ManagerBench], variable: str, setting: str
) -> None:
    with pytest.raises(SettingsError, match=f"{variable}='absent' cannot be used: a policy that can be made"):
        make_manager(disk_blocks=32, **{setting: "absent"})


@pytest.mark.usefixtures("plugin")
def test_a_library_that_cannot_be_made_leaves_its_directory_to_the_next(tmp_path: Path) -> None:
    options = {
        "host": 4 * LAYOUT.block_bytes,
        "disk": 64 * LAYOUT.block_bytes,
        "disk_dir": str(tmp_path / "disk"),
        "namespace": kvbm.Namespace(model="test", fields=()),
    }
    with pytest.raises(RuntimeError, match="too large for me"):
        kvbm.BlockManager(LAYOUT, **options, eviction="only_small")
    with kvbm.BlockManager(LAYOUT, **options, eviction="lru") as manager:
        assert manager.match([1] * 8) is not None
