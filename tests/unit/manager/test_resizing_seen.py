"""A resize that is under way can be seen, and says what it has cost where it is refused after all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvbm.admin_protocol import Describe, Description, Resized, ResizeReport
from kvbm.manager import carrying
from kvbm.present.numbers import format_bytes
from rigs.manager import KEYS, LAYOUT, OTHER, ManagerBench, store
from rigs.resizing import PassingClock, begin, come_back, holds, operator, resize, sent_away


@pytest.fixture
def busy(make_manager: Callable[..., ManagerBench], monkeypatch: pytest.MonkeyPatch) -> ManagerBench:
    """A manager that carries one block in a turn, and would share its host memory among two namespaces."""
    monkeypatch.setattr(carrying, "PIECE_BLOCKS_MAX", 1)
    monkeypatch.setattr(carrying, "SCANNED_AT_ONCE", 4)
    return make_manager(namespaces=2, host_blocks=32, clock=PassingClock(50.0))


def hold(manager: ManagerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resize does not end while another operator is busy."""
    monkeypatch.setattr(manager.server.resizing, "_others_busy", lambda session: True)


def command(manager: ManagerBench, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvbm.cli.main", *words, "--manager", manager.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def printed(manager: ManagerBench, *words: str) -> str:
    """What a command prints of the manager, which the test steps meanwhile."""
    with command(manager, *words) as child:
        manager.until(lambda: child.poll() is not None, "the command never ended")
        out, said = child.communicate()
    assert (child.returncode, said) == (0, "")
    return out


def report_of(manager: ManagerBench) -> ResizeReport | None:
    other = operator(manager)
    other.send(Describe())
    report = other.expect(Description).resizing
    other.close()
    return report


def test_it_is_told_how_far_it_is(busy: ManagerBench) -> None:
    leader, worker = busy.engine()
    store(leader, worker, 1, KEYS[:8])
    assert report_of(busy) is None
    admin = operator(busy)
    begin(admin, 64)
    resizing = busy.server.resizing
    busy.until(lambda: [each.carried for each in resizing.under_way] == [2])
    report = report_of(busy)
    assert report is not None
    assert (report.host_bytes, report.blocks, report.dropped) == (64 * LAYOUT.block_bytes, 8, 0)
    assert 2 <= report.carried < 8
    assert report.seconds > 0.0
    assert admin.expect(Resized).carried == 8
    assert report_of(busy) is None


def test_every_screen_shows_it(busy: ManagerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, worker = busy.engine()
    store(leader, worker, 1, KEYS[:16])
    hold(busy, monkeypatch)
    admin = operator(busy)
    begin(admin, 24)  # 12 for each namespace
    line = (
        f"host memory is being resized to {format_bytes(24 * LAYOUT.block_bytes)}: 12 of 12 blocks carried over, "
        "4 dropped to make room, for "
    )
    resizing = busy.server.resizing
    busy.until(lambda: [each.carried for each in resizing.under_way] == [12])
    for words in (("status",), ("top", "--once")):
        assert line in " ".join(printed(busy, *words).split()), words
    (manager,) = json.loads(printed(busy, "status", "--json"))["managers"]
    view = json.loads(printed(busy, "top", "--once", "--json"))
    for report in (manager["description"]["resizing"], view["resizing"]):
        assert report.pop("seconds") > 0.0
        assert report == {"host_bytes": 24 * LAYOUT.block_bytes, "blocks": 12, "carried": 12, "dropped": 4}
    monkeypatch.undo()
    assert admin.expect(Resized).carried == 12
    assert "resized" not in printed(busy, "top", "--once")


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Children inherit that SIGINT is ignored, as a shell without job control has it for what runs behind it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_after_ctrl_c_it_goes_on_and_that_is_said(
    busy: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy.engine()
    hold(busy, monkeypatch)
    with command(busy, "resize", "--host", str(64 * LAYOUT.block_bytes)) as child:
        busy.until(lambda: busy.server.resizing.under_way != [])
        child.send_signal(signal.SIGINT)
        busy.until(lambda: child.poll() is not None)
        out, said = child.communicate()
    assert (child.returncode, out, said.count("\n")) == (1, "", 1)
    assert said.startswith(
        "kvbm: interrupted: the resize goes on in the manager; kvbm status shows how far it is"
    )
    monkeypatch.undo()
    busy.until(lambda: busy.space().arena.slot_count == 32)


def test_a_refusal_after_the_shrink_says_what_it_has_cost(busy: ManagerBench) -> None:
    leader, worker = busy.engine("a")
    store(leader, worker, 1, KEYS[:16])
    admin = operator(busy)
    begin(admin, 20)
    busy.until(lambda: [each.carried for each in busy.server.resizing.under_way] == [2])
    busy.engine("b", namespace=OTHER)
    reply = admin.expect(Resized)
    assert reply.refusal == (
        "a namespace came, went or failed meanwhile; try again; host memory keeps its size, but 6 blocks had been "
        "dropped from it to make room, and its engines connect again: 'a'"
    )
    assert (reply.dropped, reply.slots) == (6, 0)
    sent_away(leader, worker)
    assert holds(*come_back(busy, "a"), 1, KEYS[:16]) == 10


def test_a_refusal_before_it_has_cost_nothing(busy: ManagerBench) -> None:
    leader, worker = busy.engine("a")
    store(leader, worker, 1, KEYS[:6])
    admin = operator(busy)
    begin(admin, 64)
    busy.until(lambda: [each.carried for each in busy.server.resizing.under_way] == [2])
    busy.engine("b", namespace=OTHER)
    assert admin.expect(Resized).refusal == "a namespace came, went or failed meanwhile; try again"
    assert holds(leader, worker, 1, KEYS[:6]) == 6
    assert resize(admin, 64).refusal == ""
