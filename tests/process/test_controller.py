"""A manager that is asked to join Dynamo's runtime: with a stand-in for the runtime, and where there is none."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.manager_probe import SharedManager, wait_for

RUNTIME = """
import asyncio, json, os

class Endpoint:
    def __init__(self, path):
        self.path = path

    async def serve_endpoint(self, handle):
        asked = ({"Status": "G2"}, "ResetAll")
        told = [self.path, *[answer for request in asked async for answer in handle(request)]]
        with open(os.environ["TOLD"] + ".part", "w") as file:
            json.dump(told, file)
        os.replace(file.name, os.environ["TOLD"])
        if os.environ.get("GOES"):
            raise ConnectionError("etcd is not there")
        await asyncio.Event().wait()

class DistributedRuntime:
    def __init__(self, loop, discovery, requests):
        assert (discovery, requests) == ("etcd", "tcp")

    def endpoint(self, path):
        return Endpoint(path)

    def shutdown(self):
        pass
"""


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvbm-") as directory:
        yield f"{directory}/m.sock"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes what it was told."""
    package = tmp_path / "packages" / "dynamo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "runtime.py").write_text(RUNTIME)
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=":")
    monkeypatch.setenv("TOLD", str(tmp_path / "told.json"))
    return tmp_path / "told.json"


def test_requests_are_answered_by_the_manager(tmp_path: Path, socket: str, told: Path) -> None:
    manager = SharedManager(tmp_path, socket, "--host-memory", "50MB", "--dynamo-runtime")
    try:
        wait_for(told.exists, 20.0, manager.log)
        status = {"active_blocks": 0, "inactive_blocks": 0, "empty_blocks": 0}
        assert json.loads(told.read_text()) == ["dynamo.kvbm.controller", status, {"ResetAll": None}]
    finally:
        manager.close()


def test_a_runtime_that_fails_is_said_and_the_manager_serves_on(
    tmp_path: Path, socket: str, told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOES", "1")
    manager = SharedManager(tmp_path, socket, "--host-memory", "50MB", "--dynamo-runtime")
    try:
        said = "Dynamo's runtime is not joined: etcd is not there"
        wait_for(lambda: said in manager.log(), 20.0, manager.log)
        assert manager.metrics()
    finally:
        manager.close()


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is not None, reason="Dynamo is installed here")
def test_without_dynamo_there_is_a_line(tmp_path: Path, socket: str) -> None:
    manager = SharedManager(tmp_path, socket, "--host-memory", "50MB", "--dynamo-runtime")
    try:
        assert "DYN_RUNTIME_ENABLED_KVBM is set, but Dynamo is not installed here" in manager.log()
    finally:
        manager.close()
