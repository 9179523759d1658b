"""What an orchestrator asks a manager process."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from pathlib import Path

from kvbm.client.channel import Channel
from rigs.manager import worker_hello
from rigs.manager_probe import SharedManager, wait_for

DEADLINE_S = 60.0


def page(port: int, path: str) -> tuple[int, str]:
    """The status and the text of a page of the manager at this port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_manager_says_that_it_is_ready_and_which_disk_is_not(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    options = (
        "--host-blocks",
        "8",
        "--disk-blocks",
        "8",
        "--disk-dir",
        str(disk),
        "--metrics-host",
        "127.0.0.1",
    )
    manager = SharedManager(tmp_path, str(tmp_path / "run" / "m.sock"), *options)
    port = manager.metrics_port

    def ready() -> tuple[int, str]:
        return page(port, "/ready")

    worker = Channel.connect(manager.socket_path)
    try:
        worker.introduce(worker_hello(), DEADLINE_S)
        wait_for(
            lambda: ready() == (200, "ready\nhost: works\ndisk: works\n"), DEADLINE_S, lambda: str(ready())
        )
        assert page(port, "/live") == (200, "live\n")
        # It notices that its files are gone; a file in the directory's place keeps it from making others.
        shutil.rmtree(disk)
        disk.touch()
        wait_for(lambda: "\ndisk: namespace " in ready()[1], DEADLINE_S, lambda: str(ready()))
        assert ready()[0] == 503
        assert page(port, "/live")[0] == 200
    finally:
        worker.close()
        manager.close()
