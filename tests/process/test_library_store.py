"""Block managers of several processes that share nothing but a store."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import kvbm
from process.library_child import BLOCKS, load, store
from rigs.blob_services import HOST, redis_server
from rigs.checkout import ROOT
from rigs.library import NAMESPACE, layout

DEADLINE_S = 60.0


@pytest.fixture(params=["directory", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that is there."""
    if request.param == "directory":
        yield f"file://{tmp_path}"
        return
    pytest.importorskip("valkey")
    with redis_server(tmp_path) as service:
        yield f"redis://{HOST}:{service.port}/0"


def child(*words: str) -> int:
    """What a process of its own answers; it has closed its manager by then."""
    search = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    run = subprocess.run(
        [sys.executable, "-m", "process.library_store_child", *words],
        env={**os.environ, "PYTHONPATH": search},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.slow
def test_what_a_process_left_the_next_ones_find(url: str) -> None:
    assert child(url, "store", "1") == BLOCKS
    assert child(url, "load", "1") == BLOCKS
    assert child(url, "load", "1", "other weights") == 0
    with kvbm.BlockManager(layout(), host="1MB", namespace=NAMESPACE, remote=url) as ours:
        assert load(ours, 1) == BLOCKS
        assert load(ours, 2) == 0


def test_a_server_that_is_killed_costs_misses(tmp_path: Path) -> None:
    pytest.importorskip("valkey")
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(redis_server(tmp_path))
        url = f"redis://{HOST}:{service.port}/0"
        assert child(url, "store", "1") == BLOCKS
        ours = stack.enter_context(
            kvbm.BlockManager(layout(), host="1MB", namespace=NAMESPACE, remote=url, remote_deadline_ms=200)
        )
        service.process.kill()
        service.process.wait()
        assert load(ours, 1) == 0
        assert store(ours, 1) == BLOCKS
        assert load(ours, 1) == BLOCKS, "out of host memory"
