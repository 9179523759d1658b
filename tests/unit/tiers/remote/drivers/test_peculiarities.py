"""What is peculiar about a store is said once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvbm.clock import ManualClock
from kvbm.testing.blob_contract import blob_name
from kvbm.tiers.remote.drivers.opening import open_blobs


def test_traits_that_are_missing_have_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("obstore")
    from kvbm.tiers.remote.drivers.object_clients import local
    from kvbm.tiers.remote.drivers.objects import ObjectBlobs, Traits

    (tmp_path / "store").mkdir()
    poor = Traits(refuses_second=False, ranges=False)
    caplog.set_level("INFO", "kvbm")
    for _namespace in range(2):
        store = ObjectBlobs(
            local(tmp_path / "store"), f"local://{tmp_path}", ManualClock(), find_traits=lambda *_: poor
        )
        store.put(blob_name(1), [b"x"])
        assert [f"the store local://{tmp_path} {note}" for note in store.notes] == caplog.messages
    assert "ignores If-None-Match" in caplog.messages[0] and "ignores ranges" in caplog.messages[1]


def test_a_directory_without_hard_links_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "link", link)
    caplog.set_level("INFO", "kvbm")
    store = open_blobs(f"file://{tmp_path}")
    for number in range(2):
        store.put(blob_name(number), [b"x"])
    store.close()
    assert caplog.messages == [f"the store file://{tmp_path} has no hard links: a blob may be written twice"]
