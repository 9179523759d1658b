"""LoRA adapters: which name their blocks get, and when blocks are not kept."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm import adapters as adapters_module
from kvbm.adapters import CHECK_EVERY_S, FIRST_DIGEST_S, Adapters, OneThread
from kvbm.clock import ManualClock


def at_once(work: Callable[[], None]) -> None:
    work()


class Later:
    """Background work that is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def done(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The file of an adapter that is older than the engine."""
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"first")
    os.utime(path, ns=(1, 1))
    return path


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that were listed."""
    listed: list[Path] = []
    original = adapters_module.weight_files

    def noting(location: Path) -> list[Path]:
        listed.append(location)
        return original(location)

    monkeypatch.setattr(adapters_module, "weight_files", noting)
    return listed


def test_an_adapter_that_changes_while_the_engine_runs_is_kept_no_more(tmp_path: Path, weights: Path) -> None:
    clock = ManualClock()
    adapters, path = Adapters(tmp_path / "memo.json", clock, at_once), str(weights.parent)
    first = adapters.extras(path)
    assert first is not None
    assert adapters.extras(path) == first
    weights.write_bytes(b"other")
    clock.advance(CHECK_EVERY_S)
    assert adapters.extras(path) is None
    weights.write_bytes(b"first")
    clock.advance(CHECK_EVERY_S)
    assert adapters.extras(path) is None, "whichever weights were loaded"
    assert adapters.refused(path)


def test_another_file_beside_the_adapters_is_a_change(tmp_path: Path, weights: Path) -> None:
    clock = ManualClock()
    adapters, path = Adapters(tmp_path / "memo.json", clock, at_once), str(weights.parent)
    assert adapters.extras(path) is not None
    (weights.parent / "README.md").write_text("no weights")
    clock.advance(CHECK_EVERY_S)
    assert adapters.extras(path) is not None
    (weights.parent / "adapter_config.json").write_text("{}")
    clock.advance(CHECK_EVERY_S)
    assert adapters.extras(path) is None


def test_the_directory_is_listed_once_in_an_interval_whatever_comes(
    tmp_path: Path, weights: Path, looks: list[Path]
) -> None:
    clock = ManualClock()
    adapters, path = Adapters(tmp_path / "memo.json", clock, at_once), str(weights.parent)
    adapters.extras(path)
    looks.clear()
    for _ in range(100):
        adapters.extras(path)
    assert looks == []
    clock.advance(CHECK_EVERY_S)
    for _ in range(100):
        adapters.extras(path)
    assert len(looks) == 1


def test_a_new_load_is_a_reason_to_look_at_once(tmp_path: Path, weights: Path) -> None:
    adapters, path = Adapters(tmp_path / "memo.json", ManualClock(), at_once), str(weights.parent)
    assert adapters.extras(path, load=1) is not None
    weights.write_bytes(b"other")
    assert adapters.extras(path, load=1) is not None, "within the interval, and nothing was loaded"
    assert adapters.extras(path, load=2) is None


def test_blocks_are_committed_only_after_a_look_that_is_younger_than_their_copies(
    tmp_path: Path, weights: Path, looks: list[Path]
) -> None:
    clock = ManualClock(5.0)
    adapters, path = Adapters(tmp_path / "memo.json", clock, at_once), str(weights.parent)
    assert not adapters.unchanged(path, 0.0), "never seen"
    adapters.extras(path)
    clock.advance(CHECK_EVERY_S / 10)
    looks.clear()
    assert adapters.unchanged(path, 0.0)
    assert looks == [], "any look will do"
    assert adapters.unchanged(path, clock()) and adapters.unchanged(path, clock())
    assert len(looks) == 1, "one look for all that was copied by then"
    weights.write_bytes(b"other")
    clock.advance(CHECK_EVERY_S / 10)
    assert adapters.extras(path) is not None, "not noticed yet"
    assert not adapters.unchanged(path, clock())
    assert adapters.extras(path) is None
    assert not adapters.unchanged(path, 0.0)


def test_nobody_waits_for_a_digest(tmp_path: Path, weights: Path) -> None:
    later = Later()
    adapters, path = Adapters(tmp_path / "memo.json", ManualClock(), later), str(weights.parent)
    assert [adapters.extras(path) for _ in range(3)] == [None] * 3
    assert not adapters.refused(path)
    assert len(later.waiting) == 1, "it is made once"
    later.done()
    assert adapters.extras(path) is not None


def test_an_adapter_that_changes_while_it_is_digested_is_not_kept(tmp_path: Path, weights: Path) -> None:
    later = Later()
    adapters, path = Adapters(tmp_path / "memo.json", ManualClock(), later), str(weights.parent)
    assert adapters.extras(path) is None
    weights.write_bytes(b"other")
    later.done()
    assert adapters.extras(path) is None
    assert adapters.refused(path)


def test_an_adapter_that_cannot_be_read_costs_the_cache_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so once, not with every request."""
    adapters = Adapters(tmp_path / "memo.json", ManualClock(), at_once)
    empty = tmp_path / "empty"
    empty.mkdir()
    caplog.set_level("WARNING", "kvbm.vllm")
    for path in ("org/on-a-hub", str(empty)):
        assert [adapters.extras(path) for _ in range(3)] == [None] * 3
        assert adapters.refused(path)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        "org/on-a-hub",
        str(empty),
    ]


@pytest.mark.swallows("^ValueError: a defect$")
def test_a_digest_that_fails_in_any_way_is_a_refusal(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> str:
        raise ValueError("a defect")

    monkeypatch.setattr(adapters_module, "weights_digest", failing)
    adapters, path = Adapters(tmp_path / "memo.json", ManualClock(), at_once), str(weights.parent)
    assert adapters.extras(path) is None
    assert adapters.refused(path)


def test_an_adapter_younger_than_the_engine_is_kept_for_this_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say whether its files are those that were loaded."""
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"first")

    def new() -> Adapters:
        return Adapters(tmp_path / "memo.json", ManualClock(), at_once)

    engines = [new(), new()]
    extras = [engine.extras(str(weights.parent)) for engine in engines for _ in range(2)]
    assert None not in extras
    assert extras[0] == extras[1] != extras[2] == extras[3]
    monkeypatch.setattr("kvbm.engine_start.engine_start_s", lambda: time.time() + 10)
    older = [new().extras(str(weights.parent)) for _ in range(2)]
    assert older[0] == older[1] is not None


def test_one_thread_does_all_the_work_in_order_and_ends() -> None:
    run, done, gate = OneThread(), list[int](), threading.Event()
    finished = threading.Event()
    names: set[str] = set()

    def work(number: int) -> None:
        assert gate.wait(10.0)
        names.add(f"{threading.current_thread().name} {threading.get_ident()}")
        done.append(number)
        if number == 4:
            finished.set()

    for number in range(5):
        run(lambda number=number: work(number))  # type: ignore[misc]
    assert done == [], "the caller does not wait"
    gate.set()
    assert finished.wait(10.0)
    assert done == list(range(5))
    assert len(names) == 1
    again = threading.Event()
    run(again.set)
    assert again.wait(10.0)


def test_a_first_digest_is_worth_a_short_wait(tmp_path: Path, weights: Path) -> None:
    clock, background = ManualClock(), Later()
    adapters, path = Adapters(tmp_path / "memo.json", clock, background), str(weights.parent)
    assert not adapters.awaited(path), "nobody makes it"
    assert adapters.extras(path) is None
    assert adapters.awaited(path)
    clock.advance(FIRST_DIGEST_S)
    assert not adapters.awaited(path)
    background.done()
    assert adapters.extras(path) is not None
    assert not adapters.awaited(path)
