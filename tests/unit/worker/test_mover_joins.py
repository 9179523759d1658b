"""A rank that joins a manager, or is refused, or finds memory that it does not trust."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.errors import ManagerRefused, ManagerUnavailable, ManagerUntrusted
from kvbm.protocol import Welcome
from kvbm.worker.mapping import Mapping
from kvbm.worker.mover import Mover
from rigs.manager import OTHER
from rigs.mover import Rank, WatchedFinder


def test_a_worker_of_another_namespace_is_told_why(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.attach()
    hello = rank.bench.worker_hello("other", layout=rank.layout, namespace=OTHER)
    stranger = Mover(WatchedFinder(rank.bench), hello, rank.make_mapping)
    errors: list[BaseException] = []

    def join() -> None:
        try:
            stranger.attach(5.0)
        except ManagerRefused as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    rank.bench.until(lambda: errors)
    thread.join()
    assert "cannot be served" in str(errors[0])
    rank.close()


def test_memory_that_is_not_sealed_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start and when it connects again: the rank goes on without, and says so once."""
    rank = Rank(tmp_path)
    monkeypatch.setattr("kvbm.worker.mover.ADOPT_RETRY_S", 0.0)
    refusals, map_memory = [], rank.make_mapping

    def refuse(welcome: Welcome, fds: list[int]) -> Mapping:
        refusals.append(welcome)
        for fd in fds:
            os.close(fd)
        raise ManagerUntrusted("the manager's memory is not sealed")

    rank.make_mapping = refuse  # type: ignore[method-assign]
    with pytest.raises(ManagerUntrusted):
        rank.attach()
    rank.worker.start()
    rank.bench.until(lambda: len(refusals) > 2)
    assert not rank.mover.connected
    assert [record.getMessage() for record in caplog.records if "sealed" in record.getMessage()] == [
        "no KV cache for now: the manager's memory is not sealed"
    ]
    rank.make_mapping = map_memory  # type: ignore[method-assign]
    rank.bench.until(lambda: rank.mover.connected)
    rank.close()


def test_no_manager_by_the_deadline_is_said(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.stop_manager()
    with pytest.raises(ManagerUnavailable, match="no manager answers"):
        rank.worker.attach(0.05)
    rank.close()
