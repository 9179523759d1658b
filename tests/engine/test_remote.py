"""A store that two nodes share: what an engine on one computed, an engine on the other hits, with the same text.

Each engine has a process and a private manager of its own, as on two machines; all that they share is the store. With
Redis and without a store one of them has a network of its own too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.apart import ENVIRONMENT, LauncherApart, network_of
from engine.engine_process import EngineProcess
from engine.launcher import Launcher
from engine.shared_store import BLOCKS, LOADED, bucket, found, prompts, share, texts
from engine.tier_settings import host, remote
from rigs.blob_services import mooncake, moto, redis_server, seaweedfs
from rigs.manager_probe import free_port, private_managers
from rigs.namespaces import Apart, namespace


@pytest.fixture(
    params=[
        "directory",
        "seaweedfs",
        "moto",
        "mooncake",
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings of a store of each kind, on loopback."""
    if request.param == "directory":
        (tmp_path / "shared").mkdir()
        yield {"DYN_KVBM_REMOTE": f"file://{tmp_path}/shared"}
    elif request.param == "mooncake":
        (tmp_path / "index").mkdir()
        with mooncake(tmp_path) as service:
            yield {"DYN_KVBM_REMOTE": service.url(f"file://{tmp_path}/index")}
    else:
        with {"seaweedfs": seaweedfs, "moto": moto}[request.param](tmp_path) as service:
            yield bucket(service)


def test_what_one_node_computes_another_hits(
    store: dict[str, str], launcher: Launcher, second_launcher: Launcher
) -> None:
    asked = prompts(1)
    launcher.start(remote(store))
    computed = share(launcher, asked)
    second_launcher.start(remote(store))
    assert found(second_launcher, asked) == computed
    metrics = second_launcher.metrics()
    assert metrics[LOADED] >= BLOCKS * (len(asked) - 1)
    assert metrics['kvbm_failures_total{tier="remote",kind="corrupt"}'] == 0
    second_launcher.assert_nothing_held()


@pytest.fixture
def cable() -> Iterator[Apart]:
    with namespace() as apart:
        yield apart


@pytest.fixture
def node_apart(
    cable: Apart, model: Path, runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LauncherApart]:
    """Starts engines in a network of their own."""
    process = EngineProcess(tmp_path_factory.mktemp("apart"), "apart")
    try:
        launcher = LauncherApart(process, model, runtime_dir)
        launcher.move(cable.name)
        yield launcher
    finally:
        process.close()


def test_what_a_node_in_another_network_computes_is_hit_here(
    cable: Apart, node_apart: LauncherApart, second_launcher: Launcher, tmp_path: Path
) -> None:
    asked = prompts(3)
    with redis_server(tmp_path, inside=cable.inside, host=cable.there) as server:
        store = {"DYN_KVBM_REMOTE": f"redis://{cable.there}:{server.port}/0"}
        node_apart.start({**remote(store), **ENVIRONMENT})
        (manager,) = private_managers(node_apart.runtime_dir)
        assert network_of(manager) != network_of(os.getpid())
        computed = share(node_apart, asked)
        second_launcher.start(remote(store))
        assert found(second_launcher, asked) == computed
        assert second_launcher.metrics()[LOADED] >= BLOCKS * (len(asked) - 1)
        second_launcher.assert_nothing_held()


def test_what_one_node_holds_in_memory_another_hits(
    cable: Apart, node_apart: LauncherApart, second_launcher: Launcher
) -> None:
    """No store: the second node reads out of the host memory of the first one, which is in another network."""
    asked = prompts(2)
    listen = [f"{address}:{free_port()}" for address in (cable.there, cable.here)]

    def fleet(number: int) -> dict[str, str]:
        return {
            **host(),
            "DYN_KVBM_FLEET": "engines",
            "DYN_KVBM_FLEET_NODE": f"node-{number}",
            "DYN_KVBM_FLEET_LISTEN": listen[number],
            "DYN_KVBM_FLEET_PEERS": ",".join(listen),
        }

    node_apart.start({**fleet(0), **ENVIRONMENT})
    computed = texts(node_apart.process, asked)
    second_launcher.start(fleet(1))
    assert found(second_launcher, asked) == computed
    assert second_launcher.metrics()[LOADED] >= BLOCKS * (len(asked) - 1)
    second_launcher.assert_nothing_held()
    node_apart.assert_nothing_held()
