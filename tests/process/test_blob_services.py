"""Stores on bad days: credentials that do not fit, servers that are away, silent, full, restarted, or behind TLS."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm.testing.blob_contract import blob_name
from kvbm.tiers.remote.blobs import BlobStore, Put, StoreError
from kvbm.tiers.remote.drivers.credentials import Credentials
from kvbm.tiers.remote.drivers.opening import open_blobs
from rigs.blob_services import ACCESS_KEY, HOST, SECRET_KEY, rclone, redis_server
from rigs.manager_probe import free_port

KEYS = Credentials(ACCESS_KEY, SECRET_KEY)


@pytest.fixture(autouse=True)
def _packages() -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("valkey")


def trouble(store: BlobStore) -> tuple[str, str]:
    """The kind and the line of a read that fails."""
    with pytest.raises(StoreError) as caught:
        store.read(blob_name(1), 0, 10)
    assert caught.value.__cause__ is None
    return caught.value.trouble, str(caught.value)


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A server that takes connections and answers each request with `reply`; with nothing where it is empty."""
    import threading

    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if reply:
                    connection.recv(65536)
                    connection.sendall(reply)
                    connection.close()

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def http(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("403 Forbidden", "SignatureDoesNotMatch", "refused"),
        ("401 Unauthorized", "AccessDenied", "refused"),
        ("404 Not Found", "NoSuchBucket", "failed"),
        ("429 Too Many Requests", "SlowDown", "throttled"),
        ("503 Service Unavailable", "SlowDown", "throttled"),
        ("507 Insufficient Storage", "XMinioStorageFull", "full"),
        ("500 Internal Server Error", "InternalError", "failed"),
    ],
)
def test_what_an_object_store_answers_is_named_without_its_text(status: str, code: str, kind: str) -> None:
    body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId><sig>{SECRET_KEY}</sig></Error>"
    with answering(http(status, body)) as port:
        told, line = trouble(open_blobs(f"s3://bucket/x?endpoint=http://{HOST}:{port}", credentials=KEYS))
    assert told == kind
    assert code in line and "s3://bucket/x" in line
    assert ACCESS_KEY not in line and SECRET_KEY not in line


def test_wrong_keys_are_refused_by_a_real_server(tmp_path: Path) -> None:
    with rclone(tmp_path) as service:
        service.make_bucket("bucket")
        store = open_blobs(
            f"s3://bucket?endpoint={service.endpoint}", credentials=Credentials(ACCESS_KEY, "wrong")
        )
        told, line = trouble(store)
    assert told == "refused" and "wrong" not in line


@pytest.mark.parametrize("url", ["s3://bucket?endpoint=http://{host}", "redis://{host}/0"])
def test_a_server_that_is_away(url: str) -> None:
    store = open_blobs(url.format(host=f"{HOST}:{free_port()}"), credentials=KEYS, deadline_s=4.0)
    assert trouble(store)[0] == "unreachable"


@pytest.mark.parametrize("url", ["s3://bucket?endpoint=http://{host}", "redis://{host}/0"])
def test_a_silent_server_is_given_up_by_the_deadline(url: str) -> None:
    with answering(b"") as port:
        store = open_blobs(url.format(host=f"{HOST}:{port}"), credentials=KEYS, deadline_s=1.0)
        began_s = time.monotonic()
        assert trouble(store)[0] == "slow"
        # A tenth of what would be waited for without a deadline.
        assert time.monotonic() - began_s < 15.0


def test_redis_with_a_password_and_without_it(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "swordfish") as service:
        where = f"{HOST}:{service.port}/0"
        assert open_blobs(f"redis://:swordfish@{where}").put(blob_name(1), [b"x"]) is Put.CREATED
        assert open_blobs(f"redis://{where}", credentials=Credentials("", "swordfish")).read(
            blob_name(1), 0, 1
        )
        for url in (f"redis://{where}", f"redis://:sardine@{where}"):
            told, line = trouble(open_blobs(url))
            assert told == "refused" and "sardine" not in line


def test_redis_that_is_full(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as service:
        store = open_blobs(f"redis://{HOST}:{service.port}")
        with pytest.raises(StoreError) as caught:
            _fill(store)
        assert caught.value.trouble == "full"
        listed = [info.name for info in store.listing("packs/")]
        assert listed
        assert all(store.read(name, 0, 1) for name in listed)
        store.delete(listed)
        assert store.put(blob_name(99), [b"x"]) is Put.CREATED


def test_redis_that_evicts(tmp_path: Path) -> None:
    """What went is forgotten, and where the index went it is made again."""
    import valkey

    with redis_server(tmp_path, "--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru") as service:
        store = open_blobs(f"redis://{HOST}:{service.port}?prefix=p")
        for number in range(40):
            store.put(blob_name(number), [os.urandom(1 << 20)])
            store.touch(blob_name(number))
        there = [blob_name(number) for number in range(40) if store.read(blob_name(number), 0, 1)]
        assert 0 < len(there) < 40
        listed = [info.name for info in store.listing("packs/")]
        # Reading took memory too: some may have gone since.
        assert listed and set(listed) <= set(there)
        client = valkey.Valkey(port=service.port)
        assert client.zcard("p/names") == len(listed) + 1
        client.delete("p/names")
        store.put(blob_name(99), [b"x"])  # now there is an index again, with one blob
        again = [info.name for info in store.listing("packs/")]
        assert blob_name(99) in again and set(again) <= {*there, blob_name(99)}
        assert len(again) > 1


def test_redis_that_was_restarted_is_there_again_at_once(tmp_path: Path) -> None:
    with redis_server(tmp_path) as first:
        store = open_blobs(f"redis://{HOST}:{first.port}")
        assert store.put(blob_name(1), [b"x"]) is Put.CREATED
    assert trouble(store)[0] == "unreachable"
    with redis_server(tmp_path, port=first.port):
        assert store.read(blob_name(1), 0, 1) is None
        assert store.put(blob_name(1), [b"x"]) is Put.CREATED


def test_redis_behind_tls(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    with redis_server(tmp_path, tls=(certificate, key)) as service:
        where = f"{HOST}:{service.port}/0"
        assert (
            open_blobs(f"rediss://{where}?ca={certificate}").put(blob_name(1), [b"x" * 100_000])
            is Put.CREATED
        )
        found = open_blobs(f"valkeys://{where}?ca={certificate}").read(blob_name(1), 0, 100_000)
        assert found == b"x" * 100_000
        assert (
            trouble(open_blobs(f"rediss://{where}"))[0] == "refused"
        )  # signed by nobody that the system trusts


def _fill(store: BlobStore) -> None:
    for number in range(20):
        store.put(blob_name(number), [os.urandom(1 << 20)])


def _certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from ipaddress import ip_address

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = (directory / "certificate.pem", directory / "key.pem")
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
