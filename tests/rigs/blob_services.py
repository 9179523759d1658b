"""Real stores on loopback, ended with the session of the tests: SeaweedFS, moto, rclone, Redis, Mooncake.

Each is skipped with its reason where the program is not there. Buckets are made by hand: `make_bucket`.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rigs.manager_probe import free_port, wait_for
from rigs.services import HOST, START_S, running_server
from rigs.system_packages import require

ACCESS_KEY, SECRET_KEY, REGION = "AKTEST", "SKTESTSECRET", "us-east-1"
MOONCAKE_LIBRARIES = ("libibverbs.so.1", "libcurl.so.4", "libnuma.so.1")


class S3Service(NamedTuple):
    """An S3 server: its endpoint, and a bucket of its own for each test (`make_bucket`)."""

    endpoint: str
    name: str

    def make_bucket(self, bucket: str) -> None:
        """Make a bucket; what is wrong is an assertion."""
        status = signed_request("PUT", f"{self.endpoint}/{bucket}")
        assert status in (200, 409), f"{self.name} answers {status} to a new bucket"


class RedisService(NamedTuple):
    """A Redis or Valkey server."""

    port: int
    process: subprocess.Popen[bytes]


def signed_request(method: str, url: str, body: bytes = b"") -> int:
    """The status of one request, signed as S3 wants it (AWS signature version 4). 0 when nobody answers."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    _, _, host_path = url.partition("://")
    host, _, path = host_path.partition("/")
    payload = hashlib.sha256(body).hexdigest()
    signed = "host;x-amz-content-sha256;x-amz-date"
    headers = f"host:{host}\nx-amz-content-sha256:{payload}\nx-amz-date:{now}\n"
    request = "\n".join((method, f"/{path}", "", headers, signed, payload))
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{SECRET_KEY}".encode()
    for word in (now[:8], REGION, "s3", "aws4_request"):
        key = hmac.new(key, word.encode(), "sha256").digest()
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    sent = urllib.request.Request(url, data=body, method=method)
    sent.add_header("x-amz-content-sha256", payload)
    sent.add_header("x-amz-date", now)
    sent.add_header(
        "Authorization",
        f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, SignedHeaders={signed}, Signature={signature}",
    )
    try:
        with urllib.request.urlopen(sent, timeout=10.0) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextmanager
def seaweedfs(directory: Path) -> Iterator[S3Service]:
    """SeaweedFS with its S3 gateway. It honours If-None-Match and ranges."""
    weed = require("weed")
    data = directory / "weed"
    data.mkdir()
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    port, master, volume, filer = (free_port() for _ in range(4))
    grpc = [free_port() for _ in range(4)]
    words = [
        *(weed, "server", f"-dir={data}", f"-ip={HOST}", f"-ip.bind={HOST}"),
        *("-s3", f"-s3.port={port}", f"-s3.config={config}", f"-s3.port.grpc={grpc[0]}"),
        *(f"-master.port={master}", f"-master.port.grpc={grpc[1]}", f"-volume.port={volume}"),
        *(f"-volume.port.grpc={grpc[2]}", f"-filer.port={filer}", f"-filer.port.grpc={grpc[3]}"),
        # Two servers of one machine would meet at these two.
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=200"),
        *("-master.volumeSizeLimitMB=1024", "-master.telemetry=false"),
    ]
    endpoint = f"http://{HOST}:{port}"
    with running_server(words, directory / "weed.log"):
        # The port answers seconds before a bucket can be written to.
        wait_for(
            lambda: (
                signed_request("PUT", f"{endpoint}/ready") in (200, 409)
                and signed_request("PUT", f"{endpoint}/ready/blob", b"x") == 200
            ),
            START_S,
            (directory / "weed.log").read_text,
        )
        yield S3Service(endpoint, "seaweedfs")


@contextmanager
def moto(directory: Path) -> Iterator[S3Service]:
    """moto's server: S3 in a Python process. It honours If-None-Match and ranges, and looks at no credentials."""
    server = require("moto_server")
    port = free_port()
    with running_server([server, "-H", HOST, "-p", str(port)], directory / "moto.log", port):
        yield S3Service(f"http://{HOST}:{port}", "moto")


@contextmanager
def rclone(directory: Path) -> Iterator[S3Service]:
    """rclone's S3 server over a directory. It ignores If-None-Match and ranges."""
    server = require("rclone")
    data = directory / "rclone"
    data.mkdir()
    port = free_port()
    words = [
        *(server, "serve", "s3", str(data), "--addr", f"{HOST}:{port}"),
        *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", os.devnull),
    ]
    with running_server(words, directory / "rclone.log", port):
        yield S3Service(f"http://{HOST}:{port}", "rclone")


@contextmanager
def redis_server(
    directory: Path,
    *more: str,
    port: int = 0,
    tls: tuple[Path, Path] | None = None,
    inside: Sequence[str] = (),
    host: str = HOST,
) -> Iterator[RedisService]:
    """A Redis server in memory, at a port of its own unless one is named. `tls`: its certificate and key.

    With TLS it speaks nothing else. `inside`: words before the program, where it runs in a network of its own and
    listens at `host`.
    """
    server = require("redis-server")
    port = port or free_port()
    listen = ["--port", str(port)]
    if tls is not None:
        listen = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
        listen += ["--tls-cert-file", str(tls[0]), "--tls-key-file", str(tls[1])]
    words = [
        *inside,
        server,
        *listen,
        "--bind",
        host,
        "--protected-mode",
        "no" if inside else "yes",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(directory),
        *more,
    ]
    with running_server(words, directory / f"redis-{port}.log", port, host) as process:
        yield RedisService(port, process)


class MooncakeService(NamedTuple):
    """A Mooncake master, and the node that gives memory to its pool."""

    port: int
    master: subprocess.Popen[bytes]
    holder: subprocess.Popen[bytes] | None

    def url(self, index: str, more: str = "") -> str:
        """The URL of a store whose index is that one."""
        return f"mooncake://{HOST}:{self.port}?index={index}{more}"


@contextmanager
def mooncake_master(directory: Path, port: int = 0) -> Iterator[MooncakeService]:
    """A Mooncake master alone: a pool of nobody's memory."""
    for library in MOONCAKE_LIBRARIES:
        require(library)
    master = require("mooncake_master")
    port = port or free_port()
    words = [
        *(master, f"-rpc_address={HOST}", f"-rpc_port={port}"),
        *(f"-metrics_host={HOST}", f"-metrics_port={free_port()}"),
    ]
    with running_server(words, directory / f"mooncake-{port}.log", port) as process:
        yield MooncakeService(port, process, None)


@contextmanager
def mooncake(directory: Path) -> Iterator[MooncakeService]:
    """A Mooncake master and a process that gives 256 MiB."""
    with mooncake_master(directory) as service:
        log = directory / f"holder-{service.port}.log"
        words = [sys.executable, "-c", _HOLDER, f"{HOST}:{service.port}"]
        with running_server(words, log) as holder:
            wait_for(lambda: "holder is there" in log.read_text(), START_S, log.read_text)
            yield service._replace(holder=holder)


_HOLDER = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 0, "tcp", "", sys.argv[1])
print("holder is there" if code == 0 else f"holder: {code}", flush=True)
threading.Event().wait()
"""
