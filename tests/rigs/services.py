"""Servers on loopback: how one is started, and etcd with NATS, for Dynamo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvbm.demo.server import HOST, free_port
from rigs.manager_probe import wait_for
from rigs.system_packages import require

START_S = 60.0


@contextmanager
def etcd_and_nats(directory: Path) -> Iterator[Mapping[str, str]]:
    """Dynamo's variables for both, running. Skips the test where one of the programs is not there."""
    etcd, nats = require("etcd"), require("nats-server")
    client, peer, port = free_port(), free_port(), free_port()
    etcd_words = [
        *(etcd, "--data-dir", str(directory / "etcd"), "--log-level", "error"),
        *(
            "--listen-client-urls",
            f"http://{HOST}:{client}",
            "--advertise-client-urls",
            f"http://{HOST}:{client}",
        ),
        *(
            "--listen-peer-urls",
            f"http://{HOST}:{peer}",
            "--initial-advertise-peer-urls",
            f"http://{HOST}:{peer}",
        ),
        *("--initial-cluster", f"default=http://{HOST}:{peer}"),
    ]
    nats_words = [nats, "-js", "-a", HOST, "-p", str(port), "-sd", str(directory / "nats")]
    with ExitStack() as ends:
        ends.enter_context(running_server(etcd_words, client, directory / "etcd.log"))
        ends.enter_context(running_server(nats_words, port, directory / "nats.log"))
        yield {"ETCD_ENDPOINTS": f"http://{HOST}:{client}", "NATS_SERVER": f"nats://{HOST}:{port}"}


@contextmanager
def running_server(
    words: Sequence[str], log: Path, port: int | None = None, host: str = HOST
) -> Iterator[subprocess.Popen[bytes]]:
    """A server, once it accepts connections at `port`; killed at the end. One that ends before fails with its log."""
    # A group of its own: some servers are children of a wrapper.
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        if port is not None:
            wait_for(lambda: process.poll() is not None or answers(port, host), START_S, log.read_text)
            assert process.poll() is None, f"{words[0]} ended: {log.read_text()[-2000:]}"
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def answers(port: int, host: str = HOST) -> bool:
    """Whether a connection is accepted there."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
