"""A child that is kept running."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from kvbm.client import kept_process
from kvbm.client.kept_process import STARTS_MAX, KeptProcess
from kvbm.clock import monotonic

PATIENCE_S = 60.0


@pytest.mark.parametrize("for_ever", [False, True])
def test_a_child_that_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_ever: bool) -> None:
    """It is given up after some starts, or never."""
    (tmp_path / "ends_at_once.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(kept_process, "PAUSE_S_MAX", 0.0)
    enough, given_up = threading.Event(), threading.Event()
    starts = list[bool]()

    def words(first: bool) -> list[str]:
        starts.append(first)
        if len(starts) > 2 * STARTS_MAX:
            enough.set()
        return ["ends_at_once"]

    def give_up(why: str) -> None:
        assert "ended 4 times" in why
        given_up.set()

    log = logging.getLogger("kvbm.test")
    child = KeptProcess("a child", words, give_up, monotonic, log, for_ever=for_ever)
    child.start()
    assert (enough if for_ever else given_up).wait(PATIENCE_S)
    child.end()
    assert given_up.is_set() is not for_ever
    assert starts[0]
    assert not any(starts[1:])
    if not for_ever:
        assert len(starts) == STARTS_MAX
