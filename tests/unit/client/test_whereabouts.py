"""What managers leave in the runtime directory when they are killed, and what of it is removed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvbm.client.finder import ERROR_SUFFIX
from kvbm.client.whereabouts import announced, sweep
from kvbm.errors import SettingsError
from kvbm.manager.process import take_lock
from rigs.other_user import NOBODY, needs_root

DEAD = "private-0123456789abcdef.sock"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def bind(path: Path) -> None:
    """A socket that refuses, as that of a killed manager, and of one that does not listen yet."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def test_what_killed_managers_left_is_swept(directory: Path) -> None:
    """Where no manager has the lock, and under no name that another program could have given."""
    bind(directory / DEAD)
    for suffix in (".lock", ERROR_SUFFIX):
        (directory / f"{DEAD}{suffix}").touch()
    starting = directory / "private-fedcba9876543210.sock"
    bind(starting)
    held = take_lock(str(starting))
    kept = {starting.name, f"{starting.name}.lock"}
    for name in ("manager.sock", "manager.sock.lock", "private-notes.sock.lock", "private-1.sock"):
        (directory / name).touch()
        kept.add(name)
    sweep(str(directory))
    assert set(os.listdir(directory)) == kept
    os.close(held)


@needs_root
def test_a_file_of_another_user_is_not_swept(directory: Path) -> None:
    theirs = directory / f"{DEAD}.lock"
    theirs.touch()
    os.chown(theirs, NOBODY, NOBODY)
    sweep(str(directory))
    assert theirs.exists()


def test_nothing_is_swept_where_others_can_write(directory: Path) -> None:
    (directory / f"{DEAD}.lock").touch()
    directory.chmod(0o777)
    with pytest.raises(SettingsError, match="this has mode 777"):
        sweep(str(directory))
    assert os.listdir(directory) == [f"{DEAD}.lock"]


def test_every_manager_that_starts_sweeps(directory: Path, tmp_path: Path) -> None:
    """A shared one too, with its socket in this directory: there may never be a private one again."""
    (directory / f"{DEAD}.lock").touch()
    record, dead = directory / "0123456789abcdef.at", tmp_path / "dead.sock"
    bind(dead)
    record.write_bytes(os.fsencode(dead))
    record.chmod(0o600)
    with announced(str(directory / "manager.sock"), str(directory)):
        assert os.listdir(directory) == []
