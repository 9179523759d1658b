"""A Redis server that answers what cannot be read."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("valkey")

from kvbm.tiers.remote.blobs import StoreError
from kvbm.tiers.remote.drivers.opening import open_blobs


@pytest.fixture(params=[b"*2\r\n$1\r\nx\r\n$1\r\n1\r\n", b"*1\r\n$1\r\n1\r\n", b"$x\r\n", b"?\r\n"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of a server that answers every request with these bytes."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection:
                while connection.recv(4096):
                    connection.sendall(request.param)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10.0)


def test_an_answer_that_cannot_be_read_is_an_error_of_the_store(port: int) -> None:
    blobs = open_blobs(f"redis://127.0.0.1:{port}/0")
    with pytest.raises(StoreError, match="the server answers with an error"):
        blobs.now_s()
