"""Whatever a user names as a socket, his files stay: for the manager, its web page and its events alike."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.client.admin_http import listening
from kvbm.clock import monotonic
from kvbm.errors import SettingsError
from kvbm.events.publisher import EventPublisher
from kvbm.manager.process import serve, take_lock
from kvbm.settings import Settings

HOST_BYTES = 1 << 20


def serve_manager(path: Path) -> None:
    serve(Settings(manager=str(path), host_bytes=HOST_BYTES, runtime_dir=str(path.parent / "run")), str(path))


def lock_manager(path: Path) -> None:
    os.close(take_lock(str(path)))


def serve_page(path: Path) -> None:
    with listening(f"unix:{path}"):
        pass


def publish_events(path: Path) -> None:
    publisher = EventPublisher(f"ipc://{path}", None, monotonic, time.time)
    publisher.start()
    publisher.close()


USERS = {user.__name__: user for user in (serve_manager, lock_manager, serve_page, publish_events)}


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling link"])
def test_anything_but_a_socket_is_refused_and_kept(
    tmp_path: Path, kind: str, user: Callable[[Path], None]
) -> None:
    path = tmp_path / "kvbm.toml"
    match kind:
        case "file":
            path.write_text("host_bytes = '4GB'")
        case "directory":
            path.mkdir()
        case "link":
            (tmp_path / "target").write_text("x")
            path.symlink_to(tmp_path / "target")
        case _:
            path.symlink_to(tmp_path / "nothing")
    before = path.lstat()
    with pytest.raises(SettingsError, match=f"{path}' cannot be used: .*; this is a {kind.split()[-1]}"):
        user(path)
    assert path.lstat() == before
    assert not (tmp_path / "kvbm.toml.lock").exists()


@pytest.mark.parametrize("user", [serve_manager, serve_page, publish_events])
def test_a_socket_that_a_process_listens_at_is_refused_and_kept(
    tmp_path: Path, user: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        inode = path.lstat().st_ino
        # A full queue is an answer too, and no reason to wait.
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(str(path))
        with pytest.raises(SettingsError, match="Address already in use"):
            user(path)
        assert path.lstat().st_ino == inode
        for each in waiting:
            each.close()


@pytest.mark.parametrize("user", [serve_page, publish_events])
def test_a_socket_that_no_process_listens_at_is_replaced(
    tmp_path: Path, user: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    user(path)


def test_a_file_that_took_the_place_of_the_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening(f"unix:{path}"):
        path.unlink()
        path.write_text("a file of the user's")
    assert path.read_text() == "a file of the user's"
