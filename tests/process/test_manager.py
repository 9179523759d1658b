"""The manager as a real process: its start, its end, and the line that an engine gets when it cannot start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm.client.channel import Channel
from kvbm.client.finder import (
    ERROR_SUFFIX,
    PRIVATE_MANAGER,
    ManagerAddress,
    ManagerFinder,
)
from kvbm.errors import ManagerRefused, ManagerUnavailable, ManagerUntrusted, SettingsError
from kvbm.hashing import join_keys
from kvbm.manager.process import METRICS_PORTS_MAX, serve, take_lock
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    Hello,
    Lookup,
    LookupReply,
    Ready,
    Reserve,
    ReserveReply,
    Welcome,
)
from kvbm.runtime_dir import make_runtime_dir
from kvbm.settings import Settings
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.host import open_arena
from rigs.manager import KEYS, worker_hello

DEADLINE_S = 60.0
GRACE_S = "0.05"
SERVE = """
import sys, msgspec
from kvbm.manager.process import serve, take_lock
from kvbm.settings import Settings
lock = take_lock(sys.argv[1])
serve(msgspec.json.decode(sys.argv[2], type=Settings), sys.argv[1])
"""


def manager_pid(channel: Channel) -> int:
    """The process at the other end, by the kernel's word."""
    with socket.socket(fileno=os.dup(channel.fileno())) as connection:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def wait_until_free(lock_path: str) -> None:
    """Until no process holds the lock, which is as long as its manager lives. pytest's own timeout is the deadline."""
    try:
        fd = os.open(lock_path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


class Node:
    """A runtime directory, and the engines and managers in it."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.settings = Settings(
            runtime_dir=str(directory), **{"host_blocks": 8, "log_level": "warn", **settings}
        )
        self.address = ManagerAddress.of(self.settings, "engine-1")
        self.channels: list[Channel] = []

    @property
    def lock_path(self) -> str:
        return self.address.socket_path + ".lock"

    @property
    def error_path(self) -> str:
        return self.address.socket_path + ERROR_SUFFIX

    def finder(self) -> ManagerFinder:
        return ManagerFinder(self.address, self.settings, os.environ, time.monotonic)

    def join(
        self, hello: Hello | None = None, finder: ManagerFinder | None = None
    ) -> tuple[Channel, Welcome]:
        channel, welcome = (finder or self.finder()).establish(
            hello or worker_hello(), DEADLINE_S, time.sleep
        )
        self.channels.append(channel)
        return channel, welcome

    def spawn(self, *arguments: str) -> None:
        """A private manager as `ManagerFinder` starts it, with arguments of ours."""
        make_runtime_dir(self.settings.runtime_dir)
        lock_fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        settings = msgspec.json.encode(self.settings).decode()
        command = [sys.executable, "-m", "kvbm.manager.process", self.address.socket_path, str(lock_fd)]
        child = subprocess.Popen([*command, settings, *arguments], pass_fds=[lock_fd])
        os.close(lock_fd)
        assert child.wait(DEADLINE_S) == 0, "it leaves its parent at once"

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        try:
            last = Channel.connect(self.address.socket_path)
        except ManagerUnavailable:
            pass
        else:
            os.kill(manager_pid(last), signal.SIGKILL)
            last.close()
        wait_until_free(self.lock_path)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def build(**settings: Any) -> Node:
        nodes.append(Node(tmp_path / "run", **settings))
        return nodes[-1]

    yield build
    for node in nodes:
        node.close()


def ask(channel: Channel, kind: type[Any]) -> Any:
    """The next message of this kind."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        assert channel.wait(end_s - time.monotonic())
        for message in channel.receive():
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__} came")


def receive_until_the_end(channel: Channel) -> None:
    """Until the session ends, which raises ManagerUnavailable."""
    while channel.wait(DEADLINE_S):
        channel.receive()


# ---- private managers


def test_a_race_of_starters_settles_to_one_manager(make: Callable[..., Node]) -> None:
    node = make()
    joined: list[tuple[Channel, Welcome]] = []
    starters = [
        threading.Thread(
            target=lambda rank=rank: joined.append(node.join(worker_hello("e", rank=rank, rank_count=4)))
        )
        for rank in range(4)
    ]
    for thread in starters:
        thread.start()
    for thread in starters:
        thread.join(DEADLINE_S)
    assert len(joined) == 4
    assert len({manager_pid(channel) for channel, _ in joined}) == 1
    assert len({welcome.epoch for _, welcome in joined}) == 1
    status = os.stat(node.settings.runtime_dir)
    assert stat.S_IMODE(status.st_mode) == 0o700
    assert stat.S_IMODE(os.stat(node.address.socket_path).st_mode) == 0o600


def test_a_foreign_kvbm_in_the_working_directory_is_not_what_is_started(
    make: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may be started in a folder that others write to."""
    for name in ("kvbm/__init__.py", "kvbm/manager/__init__.py", "kvbm/manager/process.py", "runpy.py"):
        path = tmp_path / "cwd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path[1:])))
    monkeypatch.chdir(tmp_path / "cwd")
    channel, _ = make().join()
    assert not (tmp_path / "ran").exists()
    words = Path(f"/proc/{manager_pid(channel)}/cmdline").read_text().split("\0")
    assert PRIVATE_MANAGER in words, "an operator finds it with ps"


def test_after_a_kill_the_next_attempt_starts_another(make: Callable[..., Node]) -> None:
    node = make()
    finder, other = node.finder(), node.finder()
    channel, welcome = node.join(finder=finder)
    os.kill(manager_pid(channel), signal.SIGKILL)
    wait_until_free(node.lock_path)
    with pytest.raises(ManagerUnavailable):
        receive_until_the_end(channel)
    again, second = node.join(finder=other)
    assert second.epoch != welcome.epoch
    third, same = node.join(Hello(version=PROTOCOL_VERSION, role="admin"), finder)
    assert same.epoch == second.epoch
    assert manager_pid(third) == manager_pid(again)


def test_it_ends_after_its_last_engine_and_leaves_nothing_behind(make: Callable[..., Node]) -> None:
    node = make()
    node.spawn("1", GRACE_S)
    first, _ = node.join(worker_hello("a"))
    second, _ = node.join(worker_hello("b"))
    first.close()
    admin, _ = node.join(Hello(version=PROTOCOL_VERSION, role="admin"))
    second.close()
    with pytest.raises(ManagerUnavailable):
        receive_until_the_end(admin)
    wait_until_free(node.lock_path)
    assert os.listdir(node.settings.runtime_dir) == []


def test_it_outlives_the_process_that_started_it(make: Callable[..., Node]) -> None:
    """Engines kill all their children when they stop, and blocks are still to be written then."""
    node = make()
    channel, _ = node.join()
    with open(f"/proc/{manager_pid(channel)}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    assert os.getsid(manager_pid(channel)) != os.getsid(0)


def test_a_private_manager_takes_the_next_free_metrics_port_and_says_so(
    make: Callable[..., Node], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        make(metrics=True, metrics_port=port).join()
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if f"DYN_KVBM_METRICS_PORT={port} is in use" in line]
    url = line.rpartition(" ")[2]
    assert port < int(url.rpartition(":")[2].partition("/")[0]) < port + METRICS_PORTS_MAX
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as page:
        assert b"kvbm_sessions" in page.read()


def test_without_any_free_metrics_port_a_private_manager_serves_all_the_same(
    make: Callable[..., Node], capfd: pytest.CaptureFixture[str]
) -> None:
    """The last port there is has no next one."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # somebody has it already, which serves as well
            held.enter_context(socket.create_server(("127.0.0.1", 65535)))
        make(metrics=True, metrics_port=65535).join()
    assert "no metrics are served" in capfd.readouterr().err


def test_a_shared_manager_is_refused_a_metrics_port_in_use(make: Callable[..., Node], tmp_path: Path) -> None:
    """An operator named it, and looks for the metrics there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = make(metrics=True, metrics_port=taken.getsockname()[1]).settings
        with pytest.raises(SettingsError, match=r"DYN_KVBM_METRICS_PORT=.* choose a free port"):
            serve(settings, str(tmp_path / "run" / "shared.sock"))


@pytest.mark.swallows("^AssertionError: no level is called shouting")
def test_a_defect_at_the_start_is_said_too(make: Callable[..., Node]) -> None:
    node = make(log_level="shouting")
    with pytest.raises(ManagerRefused, match="private manager failed: AssertionError"):
        node.join()


def test_a_disk_directory_that_cannot_be_used_is_said_to_the_engine(
    make: Callable[..., Node], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    node = make(disk_blocks=8, disk_dir=str(tmp_path / "file"))
    with pytest.raises(ManagerRefused) as caught:
        node.join()
    assert str(tmp_path / "file") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_tier_below_one_request_is_said_in_the_engines_log_and_works(
    make: Callable[..., Node], capfd: pytest.CaptureFixture[str]
) -> None:
    """A private manager writes to the stderr of the engine that started it."""
    node = make(host_blocks=2)
    node.join(msgspec.structs.replace(worker_hello(), request_blocks=3))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "one request may need" in line]
    assert "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=2 gives 2 blocks" in line


def test_a_runtime_directory_that_others_can_write_to_is_refused(make: Callable[..., Node]) -> None:
    node = make()
    os.mkdir(node.settings.runtime_dir)
    os.chmod(node.settings.runtime_dir, 0o777)
    with pytest.raises(ManagerRefused, match=r"DYN_KVBM_RUNTIME_DIR.*only you own"):
        node.join()


def test_a_directory_that_was_mended_is_used_at_the_next_attempt(
    make: Callable[..., Node], tmp_path: Path
) -> None:
    node = make()
    (tmp_path / "target").mkdir()
    os.symlink(tmp_path / "target", node.settings.runtime_dir)
    finder = node.finder()
    with pytest.raises(ManagerUntrusted, match="this is a link"):
        node.join(finder=finder)
    assert os.listdir(tmp_path / "target") == []
    os.unlink(node.settings.runtime_dir)
    channel, _ = node.join(finder=finder)
    assert channel.fileno() >= 0


def test_what_an_earlier_manager_died_of_is_not_believed(make: Callable[..., Node]) -> None:
    node = make()
    make_runtime_dir(node.settings.runtime_dir)
    Path(node.error_path).write_text("DYN_KVBM_METRICS_PORT=1 cannot be used: last week")
    node.join()
    assert not os.path.exists(node.error_path)


# ---- shared managers


def serve_shared(node: Node, path: str) -> subprocess.Popen[bytes]:
    settings = msgspec.json.encode(node.settings).decode()
    return subprocess.Popen([sys.executable, "-c", SERVE, path, settings])


def test_sigterm_writes_what_waits_for_disk_and_exits_cleanly(
    make: Callable[..., Node], tmp_path: Path
) -> None:
    count = 200
    node = make(
        host_blocks=count, disk_blocks=count, disk_dir=str(tmp_path / "disk"), disk_offload_filter=False
    )
    path = str(tmp_path / "run" / "shared.sock")
    node.address = ManagerAddress(socket_path=path, private=False)
    manager = serve_shared(node, path)
    worker, welcome = node.join()
    leader, _ = node.join(Hello(version=PROTOCOL_VERSION, role="leader", engine="e"))
    assert ask(leader, Ready).ready
    region, generations = open_arena(worker.take_fds())
    leader.send(Reserve(store=1, parent=b"", keys=join_keys(KEYS[:count])))
    slots = ask(leader, ReserveReply).slots
    size = welcome.slot_bytes
    for slot, key in zip(slots, KEYS, strict=False):
        region[slot * size : (slot + 1) * size] = block_bytes(key, 1, size)
    leader.send(Commit(store=1))
    leader.send(Lookup(lookup=2, keys=join_keys(KEYS[:1])))
    assert ask(leader, LookupReply).ready == 1
    manager.send_signal(signal.SIGTERM)
    assert manager.wait(DEADLINE_S) == 0
    assert not os.path.exists(path)
    region.close()
    generations.close()

    manager = serve_shared(node, path)
    worker, _ = node.join()
    leader, _ = node.join(Hello(version=PROTOCOL_VERSION, role="leader", engine="e"))
    assert ask(leader, Ready).ready
    leader.send(Lookup(lookup=1, keys=join_keys(KEYS[:count])))
    found = ask(leader, LookupReply)
    assert len(found.slots) == count, "not all that was committed reached the disk"
    manager.send_signal(signal.SIGINT)
    assert manager.wait(DEADLINE_S) == 0


def test_of_two_shared_managers_at_one_path_the_second_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "shared.sock")
    held = take_lock(path)
    with pytest.raises(SettingsError, match="no other manager serves"):
        take_lock(path)
    os.close(held)
    os.close(take_lock(path))
