"""Settings that no other test sets change what a manager or a rank does; and every setting is set by some test."""

from __future__ import annotations

import errno
import json
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.errors import ManagerUnavailable
from kvbm.protocol import Hello
from kvbm.settings import SCHEMA, Settings
from kvbm.tiers.disk.syscalls import Syscalls
from rigs.checkout import ROOT
from rigs.manager import KEYS, LAYOUT, ManagerBench, store

MakeBench = Callable[..., ManagerBench]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    benches: list[ManagerBench] = []

    def make(**settings: Any) -> ManagerBench:
        (tmp_path / str(len(benches))).mkdir()
        benches.append(ManagerBench(tmp_path / str(len(benches)), **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.mark.parametrize("persist", [True, False])
def test_disk_persist(make_bench: MakeBench, tmp_path: Path, persist: bool) -> None:
    bench = make_bench(disk_blocks=8, disk_dir=str(tmp_path / "disk"), disk_persist=persist)
    bench.engine()
    (directory,) = (tmp_path / "disk").iterdir()
    assert json.loads((directory / "meta.json").read_text())["persist"] == persist
    bench.open = False
    bench.server.close(keep=bench.settings.disk_persist)
    assert directory.exists() == persist


@pytest.mark.parametrize("fallback", [True, False])
def test_disk_zerofill_fallback(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    def no_fallocate(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(Syscalls, "fallocate", no_fallocate)
    bench = make_bench(disk_blocks=8, disk_dir=str(tmp_path / "disk"), disk_zerofill_fallback=fallback)
    bench.engine()
    (slab,) = (tmp_path / "disk").rglob("slab-*")
    assert slab.stat().st_size == 8 * LAYOUT.block_bytes
    assert (slab.stat().st_blocks * 512 >= slab.stat().st_size) == fallback


@pytest.mark.parametrize("direct", [True, False])
def test_disk_o_direct(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    opened: list[int] = []
    real = Syscalls.open

    def open_noted(self: Syscalls, path: str, flags: int, **options: Any) -> int:
        if "slab" in path:
            opened.append(flags)
        return real(self, path, flags, **options)

    monkeypatch.setattr(Syscalls, "open", open_noted)
    make_bench(disk_blocks=8, disk_dir=str(tmp_path / "disk"), disk_o_direct=direct).engine()
    o_direct = 0o40000
    assert opened
    assert all(bool(flags & o_direct) == direct for flags in opened)


@pytest.mark.parametrize(("window", "rate"), [(1, 0.0), (2, 0.5)])
def test_stats_window_requests(make_bench: MakeBench, window: int, rate: float) -> None:
    bench = make_bench(stats_window_requests=window)
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(1, KEYS[:2])
    leader.lookup(2, KEYS[4:6])
    bench.tick(10.0)
    assert bench.metrics.value("kvbm_host_cache_hit_rate") == rate


def test_stats_log_interval_s(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench(stats_log_interval_s=30)
    leader, _ = bench.engine()

    def lines() -> int:
        return sum("Cache Hit Rates" in record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.INFO):
        leader.lookup(1, KEYS[:2])
        bench.tick()
        assert lines() == 1
        leader.lookup(2, KEYS[:2])
        bench.tick(27.0)
        assert lines() == 1
        bench.tick(5.0)
        assert lines() == 2


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Hello, float]]:
    """A rank of an engine whose device and manager are not there: its first words, and how long it waits."""
    from kvbm.vllm_integration import worker_side

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_worker"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.v1.worker.gpu_worker"].Worker = object  # type: ignore[attr-defined]
    monkeypatch.setattr(worker_side.weight_changes, "count_updates", lambda *_: None)
    cache = SimpleNamespace(description="", device="gpu", shard_bytes=4096)
    monkeypatch.setattr(worker_side.DeviceCache, "from_tensors", lambda *_: cache)
    monkeypatch.setattr(worker_side, "engine_namespace", lambda *_: SimpleNamespace(ephemeral=False))
    monkeypatch.setattr(worker_side, "kv_replicas", lambda *_: 1)
    monkeypatch.setattr(worker_side, "numa_node", lambda device: 1)
    monkeypatch.setattr(worker_side, "Mover", lambda finder, hello, map_arena: hello)
    monkeypatch.setattr(worker_side.ManagerFinder, "attempt", lambda self: None)
    waited: list[float] = []

    class Waiting:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def attach(self, timeout_s: float) -> None:
            waited.append(timeout_s)
            raise ManagerUnavailable("nobody")

    monkeypatch.setattr(worker_side, "Worker", Waiting)
    monkeypatch.setattr(worker_side, "Hello", SimpleNamespace)
    monkeypatch.setattr(worker_side, "BlockLayout", SimpleNamespace)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_rank=0),
        model_config=SimpleNamespace(max_model_len=64),
    )
    full = type("FullAttentionSpec", (), {"block_size": 16})
    spec = SimpleNamespace(kv_cache_spec=full())
    caches = SimpleNamespace(num_blocks=4, kv_cache_groups=[spec])

    def start(**settings: Any) -> tuple[Hello, float]:
        side = worker_side.WorkerSide(config, caches, Settings(runtime_dir=str(tmp_path), **settings), {})
        with pytest.raises(ManagerUnavailable):
            side.register({"layer": None})  # type: ignore[dict-item]  # a stub
        return side.mover, waited[-1]  # type: ignore[return-value]  # a stub

    return start


@pytest.mark.parametrize(("numa", "node"), [(True, 1), (False, -1)])
def test_numa(rank: Callable[..., tuple[Hello, float]], numa: bool, node: int) -> None:
    assert rank(numa=numa)[0].numa_node == node


@pytest.mark.parametrize("wanted", [True, False])
def test_huge_pages_of_a_rank(
    rank: Callable[..., tuple[Any, float]], monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """`Mapping` gets it, which asks the kernel (tests/process/test_attachment.py)."""
    from kvbm.vllm_integration import worker_side

    monkeypatch.setattr(worker_side, "Mover", lambda finder, hello, map_arena: map_arena)
    assert rank(huge_pages=wanted)[0].keywords["huge_pages"] is wanted


@pytest.mark.parametrize("seconds", [7, 1800])
def test_init_timeout_s(rank: Callable[..., tuple[Hello, float]], seconds: int) -> None:
    assert rank(init_timeout_s=seconds)[1] == seconds


# ---- the schema as a whole

SOURCES_ONLY = ("test_load.py", "test_sources.py", "test_parse.py", "test_rules.py", "test_main.py")
"""Tests of how settings are read: they set all of them, and see no effect."""


def unset_settings(texts: list[str]) -> list[str]:
    """The settings that none of these tests sets, by field, variable or flag."""
    found = []
    for setting in SCHEMA:
        names = [rf"\b{setting.field}=", rf"[\"']{setting.field}[\"']:", rf"\b{setting.variable}\b"]
        if setting.flag:
            names.append(rf"[\"']{re.escape(setting.flag)}[\"'=]")
        if not setting.no_effect and not any(re.search("|".join(names), text) for text in texts):
            found.append(setting.field)
    return found


def test_every_setting_with_an_effect_is_set_by_a_test_of_the_effect() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path.name not in SOURCES_ONLY]
    assert unset_settings(texts) == []


def test_a_setting_that_no_test_sets_is_found() -> None:
    fields = [setting.field for setting in SCHEMA if not setting.no_effect]
    assert unset_settings([]) == fields
    assert unset_settings([f"Settings({fields[0]}=1)"]) == fields[1:]
