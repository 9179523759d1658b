"""A store is tried once at the start: a wrong one has a line, and nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.clock import Clock, ManualClock
from kvbm.manager.remote_trial import remote_trial
from kvbm.settings import Settings
from kvbm.tiers.remote.blobs import BlobStore, Buffer, StoreError
from rigs.faulty_blobs import MemoryBlobs


def opening(store: BlobStore) -> Callable[[Settings, Clock, float], BlobStore]:
    return lambda *_: store


def wait_for_the_trial() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvbm-remote-trial":
            thread.join()


def warnings(caplog: pytest.LogCaptureFixture, settings: Settings, **options: Any) -> list[str]:
    with remote_trial(settings, ManualClock(), **options):
        wait_for_the_trial()
    return caplog.messages


def test_a_directory_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = warnings(caplog, Settings(remote=f"file://{tmp_path}/none"))
    assert "DYN_KVBM_REMOTE" in line and f"{tmp_path}/none" in line
    assert not (tmp_path / "none").exists()


def test_one_that_works_has_no_line_and_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings(caplog, Settings(remote=f"file://{tmp_path}")) == []
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize(("writes", "lines"), [(True, 1), (False, 0)])
def test_rights_to_write_count_where_it_writes(
    caplog: pytest.LogCaptureFixture, writes: bool, lines: int
) -> None:
    class ReadOnly(MemoryBlobs):
        def put(self, name: str, parts: object) -> Any:
            raise StoreError("refused", "no right to write")

    store = ReadOnly(ManualClock())
    settings = Settings(remote="file:///store", remote_write=writes)
    assert len(warnings(caplog, settings, open_store=opening(store))) == lines
    assert store.closed


def test_a_store_that_does_not_answer_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    asked, answers = threading.Event(), threading.Event()

    class Hanging(MemoryBlobs):
        def read(self, name: str, start: int, end: int) -> Buffer | None:
            asked.set()
            answers.wait()
            raise StoreError("slow", "it did not answer")

    store = Hanging(ManualClock())
    settings = Settings(remote="file:///store")
    with remote_trial(settings, ManualClock(), open_store=opening(store)):
        asked.wait()
        assert not store.closed and caplog.messages == []
        answers.set()
        wait_for_the_trial()
    (line,) = caplog.messages
    assert line.endswith("it did not answer")
