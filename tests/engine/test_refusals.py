"""Every refusal is one line: the engine runs without KVBM, or its start ends. Never in between."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from engine import reach
from engine.engine_process import EngineFailed, EngineProcess
from engine.launcher import Launcher, differences
from engine.model_configs import write_config
from engine.patience import wait_for_every_store
from engine.tier_settings import HOST_BLOCKS, SMALL_HOST_BLOCKS, disk, host
from engine.vllm_versions import VERSION
from engine.workload import again, some, workload
from rigs.manager_probe import private_managers

Reference = dict[str, list[int]]


def lines_with(engine: EngineProcess, words: str) -> list[str]:
    """The lines of the log that hold these words, but for those of a traceback."""
    return [line for line in engine.log().splitlines() if words in line and "level=" in line]


def refused(launcher: Launcher, settings: dict[str, str], **options: Any) -> str:
    """The error that ends the engine's start."""
    with pytest.raises(EngineFailed) as caught:
        launcher.start(settings, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- models


def test_model_that_is_not_supported(launcher: Launcher, tmp_path: Path) -> None:
    """One line, no manager, and the engine serves."""
    directory = write_config(tmp_path / "gemma3_text", "gemma3_text")
    engine = launcher.start(
        host(),
        model=str(directory),
        load_format="dummy",
        num_gpu_blocks_override=96,
        prefix_caching_hash_algo="xxhash",
    )
    said = lines_with(engine, "KVBM is off for this engine")
    assert len(said) == 1
    assert ("prefix_caching_hash_algo=sha256" if VERSION >= (0, 32) else "from vLLM 0.32 on") in said[0]
    assert private_managers(launcher.runtime_dir) == []
    requests = [request for request in workload() if not request.parent][:12]
    assert len(engine.run(requests).outputs) == 12


def test_prefix_caching_is_off(launcher: Launcher, reference: Reference) -> None:
    engine = launcher.start(host(), enable_prefix_caching=False)
    assert len(lines_with(engine, "KVBM is off for this engine: prefix caching is off")) == 1
    assert differences(reference, engine.run(workload())) == []


# ---- settings


@pytest.mark.quick
def test_size_that_does_not_parse(launcher: Launcher) -> None:
    message = refused(launcher, {"DYN_KVBM_CPU_CACHE_GB": "abc"})
    assert "DYN_KVBM_CPU_CACHE_GB='abc'" in message
    assert "a number of GB" in message


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"DYN_KVBM_CPU_CACHE_GB": "0.001"}, "DYN_KVBM_CPU_CACHE_GB=0.001"),
        (host(5), "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=5"),
    ],
)
def test_host_tier_smaller_than_a_request(launcher: Launcher, settings: dict[str, str], field: str) -> None:
    """One line in the engine's log with what would do, and it serves."""
    engine = launcher.start(settings)
    (line,) = lines_with(engine, "one request may need 24")
    assert field in line
    assert "would hold it" in line
    engine.call(wait_for_every_store, timeout_s=20.0)
    requests = [request for request in workload() if not request.parent][:4]
    for request in requests:  # together they may find it full, and are then not stored
        assert len(engine.run([request]).outputs) == 1
    assert len(lines_with(engine, "one request may need 24")) == 1
    assert launcher.metrics()["kvbm_offload_blocks_d2h"] >= 20


def test_shared_host_tier_smaller_than_a_request(launcher: Launcher, shared_manager: Any) -> None:
    """The manager's log is another's: the engine says it as well."""
    manager = shared_manager("--host-blocks", "5")
    engine = launcher.start({"DYN_KVBM_MANAGER": manager.socket_path})
    requests = [request for request in workload() if not request.parent][:4]
    assert len(engine.run(requests).outputs) == 4
    (line,) = lines_with(engine, "one request may need 24")
    assert "the manager's host tier gives 5 blocks" in line
    assert "0.002 GB for this model would hold it" in line


def test_disk_directory_that_cannot_be_written(launcher: Launcher) -> None:
    message = refused(launcher, disk(Path("/proc/kvbm"), SMALL_HOST_BLOCKS))
    assert "DYN_KVBM_DISK_CACHE_DIR='/proc/kvbm'" in message
    assert "can write to" in message


def test_metrics_port_in_use(launcher: Launcher) -> None:
    """Another engine on this host, mostly: the next free port is taken, and said."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        engine = launcher.start({**host(), "DYN_KVBM_METRICS_PORT": str(port)})
        (line,) = lines_with(engine, f"DYN_KVBM_METRICS_PORT={port} is in use")
        launcher.metrics_port = int(line.rpartition(":")[2].partition("/")[0])
        assert launcher.metrics_port != port
        requests = [request for request in workload() if not request.parent][:4]
        assert len(engine.run(requests).outputs) == 4
        assert launcher.metrics()["kvbm_offload_blocks_d2h"] > 0


def test_runtime_directory_that_somebody_else_may_have_made(
    launcher: Launcher, reference: Reference, tmp_path: Path
) -> None:
    """That is no reason not to serve: one line, no manager, nothing written, and no cache."""
    (tmp_path / "target").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "target")
    engine = launcher.start({**host(), "DYN_KVBM_RUNTIME_DIR": str(link)}, with_manager=False)
    said = lines_with(engine, "DYN_KVBM_RUNTIME_DIR")
    assert len(said) == 1
    assert "no KV cache for now" in said[0]
    assert "this is a link" in said[0]
    assert differences(reference, engine.run(workload())) == []
    assert private_managers(str(link)) == private_managers(str(tmp_path / "target")) == []
    assert list((tmp_path / "target").iterdir()) == []
    assert len(lines_with(engine, "DYN_KVBM_RUNTIME_DIR")) == 1


def test_unknown_setting(launcher: Launcher) -> None:
    """A warning with the nearest real name."""
    engine = launcher.start({**host(), "DYN_KVBM_CPU_CACHE_GBS": "4"})
    said = lines_with(engine, "DYN_KVBM_CPU_CACHE_GBS")
    assert len(said) == 1
    assert "did you mean DYN_KVBM_CPU_CACHE_GB?" in said[0]


# ---- shared managers


def test_shared_manager_of_another_namespace(launcher: Launcher, shared_manager: Any) -> None:
    """The same weights in another type: other bytes."""
    manager = shared_manager("--host-blocks", str(HOST_BLOCKS))
    settings = {"DYN_KVBM_MANAGER": manager.socket_path}
    launcher.start(settings)
    message = refused(launcher, settings, dtype="bfloat16")
    assert "namespace=" in message
    assert "dtype" in message
    assert "--namespaces 2" in message


def test_shared_manager_without_a_place_for_weights_that_may_have_changed(
    launcher: Launcher, model: Path, tmp_path: Path, shared_manager: Any
) -> None:
    """Nobody did anything wrong: the engine serves, and says that it does so without a cache."""
    manager = shared_manager("--host-blocks", str(HOST_BLOCKS))
    settings = {"DYN_KVBM_MANAGER": manager.socket_path}
    launcher.start(settings)
    young = tmp_path / "young"
    shutil.copytree(model, young)
    later_s = time.time() + 3600
    for path in young.iterdir():
        os.utime(path, (later_s, later_s))
    engine = launcher.start(settings, model=str(young), with_manager=False)
    assert len(lines_with(engine, "serving without a KV cache until it is there")) == 1
    requests = [request for request in workload() if not request.parent][:4]
    assert len(engine.run(requests).outputs) == 4


def test_shared_manager_is_missing(
    launcher: Launcher, reference: Reference, runtime_dir: Path, shared_manager: Any
) -> None:
    """The engine says so and serves without; when the manager comes, it is used."""
    path = str(runtime_dir / "later.sock")
    engine = launcher.start({"DYN_KVBM_MANAGER": path}, with_manager=False)
    assert len(lines_with(engine, f"no manager answers at {path}")) == 1
    # What tiers there are is the manager's business.
    assert lines_with(engine, "no cache tier is set") == []
    assert differences(reference, engine.run(workload())) == []
    manager = shared_manager("--host-blocks", str(HOST_BLOCKS), at=path)
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    for turn in ("+1", "+2"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    assert manager.metrics()["kvbm_onboard_blocks_h2d"] > some(100)
