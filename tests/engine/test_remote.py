"""A store that two nodes share: what an engine on one computed, an engine on the other hits, with the same text.

Each engine has a process and a private manager of its own, as on two machines; all that they share is the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.launcher import Launcher
from engine.shared_store import BLOCKS, LOADED, bucket, found, prompts, share, texts
from engine.tier_settings import host, remote
from rigs.blob_services import mooncake, moto, redis_server, seaweedfs
from rigs.manager_probe import free_port


@pytest.fixture(params=["directory", "seaweedfs", "moto", "redis", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings of a store of each kind, on loopback."""
    if request.param == "directory":
        (tmp_path / "shared").mkdir()
        yield {"DYN_KVBM_REMOTE": f"file://{tmp_path}/shared"}
    elif request.param == "redis":
        with redis_server(tmp_path) as server:
            yield {"DYN_KVBM_REMOTE": f"redis://127.0.0.1:{server.port}/0"}
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


def test_what_one_node_holds_in_memory_another_hits(launcher: Launcher, second_launcher: Launcher) -> None:
    """No store: the second node reads out of the first one's host memory."""
    asked = prompts(2)
    listen = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def fleet(number: int) -> dict[str, str]:
        return {
            **host(),
            "DYN_KVBM_FLEET": "engines",
            "DYN_KVBM_FLEET_NODE": f"node-{number}",
            "DYN_KVBM_FLEET_LISTEN": listen[number],
            "DYN_KVBM_FLEET_PEERS": ",".join(listen),
        }

    launcher.start(fleet(0))
    computed = texts(launcher.process, asked)
    second_launcher.start(fleet(1))
    assert found(second_launcher, asked) == computed
    assert second_launcher.metrics()[LOADED] >= BLOCKS * (len(asked) - 1)
    second_launcher.assert_nothing_held()
    launcher.assert_nothing_held()
