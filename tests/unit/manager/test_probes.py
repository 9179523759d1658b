"""What `/live` and `/ready` say of a manager."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.client.channel import Channel
from kvbm.clock import ManualClock
from kvbm.errors import ManagerUnavailable
from kvbm.manager.probes import LOOK_S, TURN_S_MAX, Probes
from kvbm.settings import Settings
from rigs.fake_tier import FakeTier
from rigs.manager import ManagerBench

MakeBench = Callable[..., ManagerBench]


def probes_of(bench: ManagerBench) -> Probes:
    return Probes(bench.settings, bench.clock)


def look(bench: ManagerBench, probes: Probes) -> None:
    bench.clock.advance(LOOK_S)
    bench.step()
    probes.turn_ended(bench.server.spaces)


def test_it_is_ready_from_the_first_turn_until_it_stops(make_manager: MakeBench) -> None:
    bench = make_manager()
    probes = probes_of(bench)
    assert probes.ready() == (503, "not ready: it is starting\n")
    assert probes.live() == (200, "live\n")
    look(bench, probes)
    assert probes.ready() == (200, "ready\nhost: works\n")
    probes.stopping()
    assert probes.ready() == (503, "not ready: it is stopping; queued blocks are being written\n")
    assert probes.live().status == 200


def test_a_disk_that_is_off_is_named_with_its_reason(make_manager: MakeBench, below: FakeTier) -> None:
    bench = make_manager(disk_blocks=8)
    probes = probes_of(bench)
    bench.engine()
    look(bench, probes)
    assert probes.ready() == (200, "ready\nhost: works\ndisk: works\n")
    below.break_down("the device is gone")
    look(bench, probes)
    status, text = probes.ready()
    assert status == 503
    assert "the device is gone" in text.splitlines()[1] and text.splitlines()[1].startswith("disk: ")
    assert text.splitlines()[2:] == ["host: works"]


def test_a_space_that_failed_takes_its_tiers_with_it(make_manager: MakeBench, below: FakeTier) -> None:
    bench = make_manager(disk_blocks=8)
    probes = probes_of(bench)
    bench.engine()
    bench.space().failure = "AssertionError: law"
    look(bench, probes)
    status, text = probes.ready()
    assert (status, text.count("is off: AssertionError: law")) == (503, 2)
    bench.space().failure = ""


def test_the_tiers_are_looked_at_now_and_then(make_manager: MakeBench, below: FakeTier) -> None:
    bench = make_manager(disk_blocks=8)
    probes = probes_of(bench)
    bench.engine()
    look(bench, probes)
    below.break_down("the device is gone")
    probes.turn_ended(bench.server.spaces)
    assert probes.ready().status == 200, "no time has passed"


def test_before_an_engine_comes_the_directory_of_the_disk_is_looked_at(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    for directory, status in ((tmp_path / "new" / "er", 200), (occupied / "x", 503)):
        probes = Probes(Settings(host_blocks=1, disk_blocks=1, disk_dir=str(directory)), ManualClock())
        probes.turn_ended(())
        answer = probes.ready()
        assert answer.status == status, answer
        assert ("DYN_KVBM_DISK_CACHE_DIR=" in answer.text) == (status == 503)


def test_a_directory_of_somebody_else_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    probes = Probes(Settings(disk_blocks=1, disk_dir=str(tmp_path / "x")), ManualClock())
    probes.turn_ended(())
    assert f"{tmp_path} is no directory that user" in probes.ready().text


def test_a_loop_that_stands_still_is_dead_but_not_while_it_writes_at_its_end() -> None:
    clock = ManualClock(7.0)
    probes = Probes(Settings(host_blocks=1), clock)
    clock.advance(TURN_S_MAX)
    assert probes.live().status == 200
    clock.advance(1.0)
    assert probes.live() == (503, f"dead: the loop has not turned for {TURN_S_MAX + 1:.0f} s\n")
    probes.turn_ended(())
    assert probes.live().status == 200
    clock.advance(2 * TURN_S_MAX)
    probes.stopping()
    assert probes.live().status == 200


def test_nobody_is_let_in_while_the_last_blocks_are_written(
    make_manager: MakeBench, below: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that came then would wait for the end of it."""
    bench = make_manager(disk_blocks=8)
    bench.engine()
    tried: list[str] = []
    close = below.close

    def while_closing(keep: bool, deadline_s: float) -> None:
        with pytest.raises(ManagerUnavailable) as refusal:
            Channel.connect(bench.path)
        tried.append(str(refusal.value))
        close(keep, deadline_s)

    monkeypatch.setattr(below, "close", while_closing)
    bench.close()
    assert len(tried) == 1
