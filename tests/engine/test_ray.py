"""An engine whose ranks are actors of Ray, on one node and over two with a manager each: the same text as without us.

Run by `make ray-test`, whose environment has Ray. On a CPU one thing is added to vLLM, by its own plug-ins for
platforms: the name by which Ray counts a CPU's devices (`rigs.ray_nodes`). Each node of Ray says that it has devices,
which nothing uses, and starts with an environment of its own, as on another machine.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import other_node, pipeline, ray_ranks, reach
from engine.engine_child import KV_CONNECTOR
from engine.engine_process import EngineProcess
from engine.launcher import Launcher, differences
from engine.model_runners import V1, chosen
from engine.vllm_versions import VERSION
from engine.workload import again, small_workload
from kvbm.vllm_integration.under_ray import NEWER_EXECUTOR, PREFIXES_VARIABLE
from rigs.manager_probe import SharedManager, free_port, private_managers, wait_for
from rigs.ray_nodes import RayNode, install_platform

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed (make ray-test)"
    ),
    pytest.mark.skipif(VERSION < (0, 32), reason="under Ray vLLM 0.32 was looked at"),
    pytest.mark.skipif(chosen() != V1, reason="under Ray engines are run on V1"),
    pytest.mark.timeout(600),
]

LOADED = "kvbm_onboard_blocks_h2d"
WORKERS = 'kvbm_sessions{role="worker"}'
LEADERS = 'kvbm_sessions{role="leader"}'
LEASED = 'kvbm_leased_blocks{tier="host"}'
FILLING = 'kvbm_pool_blocks{tier="host",state="filling"}'
RESIDENT = 'kvbm_pool_blocks{tier="host",state="resident"}'
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}
HOSTS = ("127.0.0.1", "127.0.0.2")

Managers = Callable[..., SharedManager]


class Nodes:
    """Starts nodes of Ray, and engines on them."""

    def __init__(self, directory: Path, paths: str, model: Path, process: EngineProcess) -> None:
        self.process = process
        self.launcher = Launcher(process, model, directory)
        self.directory = directory
        self._environment = {"PYTHONPATH": paths}
        self.model = model
        self._nodes: list[RayNode] = []

    @property
    def address(self) -> str:
        """Where engines find Ray."""
        return self._nodes[0].address

    def start_nodes(self, *environments: dict[str, str], devices: Sequence[int] = (1, 1)) -> None:
        """A node for each of these environments, with so many devices."""
        for host, environment, count in zip(HOSTS, environments, devices, strict=False):
            head = self._nodes[0] if self._nodes else None
            variables = {**self._environment, **environment}
            self._nodes.append(RayNode(self.directory, host, count, variables, head))

    def start(self, environment: dict[str, str], **options: Any) -> EngineProcess:
        """An engine whose ranks are on these nodes."""
        ours = {"RAY_ADDRESS": self.address, **environment}
        return self.launcher.start(ours, distributed_executor_backend="ray", **options)

    def close(self) -> None:
        """End everything."""
        self.process.close()
        for node in reversed(self._nodes):
            node.close()


@pytest.fixture
def nodes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    # Ray's sockets lie there: a socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="kvbm-"))
    paths = install_platform(directory / "platform")
    monkeypatch.setenv("PYTHONPATH", paths)
    for path in paths.split(os.pathsep):
        monkeypatch.syspath_prepend(path)
    assert sys.path[0]
    started = Nodes(directory, paths, model, EngineProcess(tmp_path, "under-ray", V1))
    yield started
    started.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_under_ray_on_one_node(nodes: Nodes, v1_reference: dict[str, list[int]], parallel: str) -> None:
    """With a private manager, which a rank starts; it ends with the engine."""
    nodes.start_nodes({}, devices=(2,))
    engine = nodes.start({"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "600"}, **{parallel: 2})
    if parallel == "pipeline_parallel_size":
        engine.call(pipeline.make_room_between_stages, timeout_s=20.0)
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    for turn in ("", "+"):
        assert differences(v1_reference, engine.run(again(small_workload(), turn)), turn) == []
    assert nodes.launcher.metrics()[LOADED] > 50
    assert nodes.launcher.metrics()[WORKERS] == 2
    nodes.launcher.assert_nothing_held()
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    engine.call(ray_ranks.leave, timeout_s=60.0)
    wait_for(lambda: not private_managers(nodes.launcher.runtime_dir), 20.0, "the private manager stays")


def test_two_nodes_say_what_one_says(
    nodes: Nodes, shared_manager: Managers, v1_reference: dict[str, list[int]]
) -> None:
    """Ranks find the manager that their node's environment names, and take all else from the engine's. The second
    manager is killed while requests are answered, and comes back empty."""
    listen = f"127.0.0.1:{free_port()}"
    first = shared_manager("--host-blocks", "600")
    second = shared_manager("--host-blocks", "600", "--node-listen", listen)
    nodes.start_nodes({}, {"DYN_KVBM_MANAGER": second.socket_path})
    variables = {"DYN_KVBM_MANAGER": first.socket_path, "DYN_KVBM_NODE_MANAGERS": f"tcp://{listen}"}
    engine = nodes.start(variables, tensor_parallel_size=2)
    found = engine.call(ray_ranks.where_ranks_are, timeout_s=20.0)
    assert [each["DYN_KVBM_MANAGER"] for each in found] == [first.socket_path, second.socket_path]
    assert [each["DYN_KVBM_ONBOARD"] for each in found] == ["always", "always"]
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    for turn in ("", "+"):
        assert differences(v1_reference, engine.run(again(small_workload(), turn)), turn) == []
    for manager in (first, second):
        metrics = manager.metrics()
        assert metrics[WORKERS] == 1
        assert metrics[LOADED] > 50
    answers = engine.call(
        other_node.run_and_kill_at, again(small_workload(), "!"), 10, second.pid, timeout_s=180.0
    )
    assert differences(v1_reference, answers, "!") == []
    back = shared_manager("--host-blocks", "600", "--node-listen", listen, at=second.socket_path)
    engine.call(reach.wait_until_ready, timeout_s=60.0)
    for turn in ("~", "~~"):
        assert differences(v1_reference, engine.run(again(small_workload(), turn)), turn) == []
    assert back.metrics()[LOADED] > 50
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    engine.call(ray_ranks.leave, timeout_s=60.0)
    for manager in (first, back):
        wait_for(lambda manager=manager: not held(manager), 10.0, lambda manager=manager: str(held(manager)))


def test_stages_on_two_nodes(
    nodes: Nodes, shared_manager: Managers, v1_reference: dict[str, list[int]]
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    first = shared_manager("--host-blocks", "600")
    second = shared_manager("--host-blocks", "600", "--node-listen", listen)
    nodes.start_nodes({}, {"DYN_KVBM_MANAGER": second.socket_path})
    variables = {"DYN_KVBM_MANAGER": first.socket_path, "DYN_KVBM_NODE_MANAGERS": f"tcp://{listen}"}
    engine = nodes.start(variables, pipeline_parallel_size=2)
    engine.call(pipeline.make_room_between_stages, timeout_s=20.0)
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    for turn in ("", "+"):
        assert differences(v1_reference, engine.run(again(small_workload(), turn)), turn) == []
    assert min(manager.metrics()[LOADED] for manager in (first, second)) > 50
    # The negative control: the second node's part of the blocks counts.
    engine.call(reach.scribble_in_rank, 1, timeout_s=20.0)
    assert len(differences(v1_reference, engine.run(again(small_workload(), "-")), "-")) > 3


def test_the_scheduler_may_be_on_a_node_without_ranks(
    nodes: Nodes, shared_manager: Managers, v1_reference: dict[str, list[int]], tmp_path: Path
) -> None:
    """No manager runs on its node, and where it looks for one the ranks find theirs."""
    listen = f"127.0.0.1:{free_port()}"
    manager = shared_manager("--host-blocks", "600", "--node-listen", listen)
    nodes.start_nodes({}, {"DYN_KVBM_MANAGER": manager.socket_path}, devices=(0, 2))
    variables = {
        "DYN_KVBM_MANAGER": str(nodes.directory / "nobody.sock"),
        "DYN_KVBM_NODE_MANAGERS": f"tcp://{listen}",
    }
    engine = nodes.start(variables, tensor_parallel_size=2)
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    for turn in ("", "+"):
        assert differences(v1_reference, engine.run(again(small_workload(), turn)), turn) == []
    assert manager.metrics()[LOADED] > 50
    assert manager.metrics()[WORKERS] == 2


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_the_older_executor(nodes: Nodes, v1_reference: dict[str, list[int]], parallel: str) -> None:
    """It passes on what the last stage's ranks report: KVBM serves without stages, and says why with them."""
    nodes.start_nodes({}, devices=(2,))
    variables = {
        NEWER_EXECUTOR: "0",
        PREFIXES_VARIABLE: "DYN_",
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "600",
    }
    engine = nodes.start(variables, **{parallel: 2})
    if parallel == "pipeline_parallel_size":
        assert "KVBM is off for this engine: pipeline_parallel_size=2 under vLLM's older" in engine.log()
        return
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    for turn in ("", "+"):
        assert differences(v1_reference, engine.run(again(small_workload(), turn)), turn) == []
    assert nodes.launcher.metrics()[LOADED] > 50
    nodes.launcher.assert_nothing_held()


def test_a_killed_actor_ends_the_engine_and_frees_its_blocks(
    nodes: Nodes, shared_manager: Managers, v1_reference: dict[str, list[int]]
) -> None:
    """The managers keep what was stored."""
    listen = f"127.0.0.1:{free_port()}"
    first = shared_manager("--host-blocks", "600")
    second = shared_manager("--host-blocks", "600", "--node-listen", listen)
    nodes.start_nodes({}, {"DYN_KVBM_MANAGER": second.socket_path})
    variables = {
        "RAY_ADDRESS": nodes.address,
        "DYN_KVBM_ONBOARD": "always",
        "DYN_KVBM_MANAGER": first.socket_path,
        "DYN_KVBM_NODE_MANAGERS": f"tcp://{listen}",
    }
    options = {
        "model": str(nodes.model),
        "num_gpu_blocks_override": 48,
        "kv_transfer_config": KV_CONNECTOR,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray",
    }
    error = nodes.process.call(
        ray_ranks.run_and_kill_a_rank, options, variables, small_workload(), 90.0, timeout_s=240.0
    )
    assert error == "EngineDeadError"
    for manager in (first, second):
        wait_for(lambda manager=manager: not held(manager), 30.0, lambda manager=manager: str(held(manager)))
        assert manager.metrics()[RESIDENT] > 0


def held(manager: SharedManager) -> dict[str, float]:
    """The sessions of a manager, and what is leased or being filled."""
    metrics = manager.metrics()
    return {name: metrics[name] for name in (WORKERS, LEADERS, LEASED, FILLING) if metrics[name]}
