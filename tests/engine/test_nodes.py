"""An engine over two nodes, each with a manager: the same text, and no request lost when one manager goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import other_node, pipeline, reach
from engine.conftest import ProcessOf
from engine.engine_child import KV_CONNECTOR
from engine.engine_process import EngineProcess
from engine.launcher import Launcher, differences
from engine.model_runners import V1, chosen
from engine.vllm_versions import VERSION
from engine.workload import again, small_workload
from rigs.manager_probe import SharedManager, free_port, wait_for

pytestmark = [
    pytest.mark.skipif(VERSION < (0, 32), reason="older releases have no nodes without Ray"),
    pytest.mark.skipif(chosen() != V1, reason="on a CPU ranks on two nodes are run on V1"),
    pytest.mark.timeout(300),
]

LOADED = "kvbm_onboard_blocks_h2d"
WORKERS = 'kvbm_sessions{role="worker"}'
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}

Start = Callable[..., EngineProcess]


@pytest.fixture
def over_nodes(
    launcher: Launcher, process_of: ProcessOf, model: Path, runtime_dir: Path
) -> Iterator[Callable[..., EngineProcess]]:
    """Starts an engine whose rank 0 finds the first of two managers, and whose rank 1 the second."""
    other = process_of(f"node-{chosen()}", chosen())

    def start(first: str, second: str, second_from_afar: str = "", **options: Any) -> EngineProcess:
        both = {
            "nnodes": 2,
            "master_addr": "127.0.0.1",
            "master_port": free_port(),
            "distributed_executor_backend": "mp",
            **options,
        }
        host = {"VLLM_HOST_IP": "127.0.0.1"}
        there = {**host, "DYN_KVBM_MANAGER": second, "DYN_KVBM_RUNTIME_DIR": str(runtime_dir / "other")}
        arguments = {
            "model": str(model),
            "num_gpu_blocks_override": 48,
            "kv_transfer_config": KV_CONNECTOR,
            **both,
            "node_rank": 1,
        }
        other.mark_log()
        other.send(other_node.serve_ranks, arguments, there)
        here = {**host, "DYN_KVBM_MANAGER": first, "DYN_KVBM_NODE_MANAGERS": second_from_afar or second}
        engine = launcher.start(here, node_rank=0, **both)
        other.receive(60.0)
        return engine

    yield start
    if launcher.process.alive:
        launcher.process.stop()
    if other.alive:
        other.call(other_node.end_ranks, timeout_s=60.0)


def test_two_nodes_say_what_one_says(
    over_nodes: Start, shared_manager: Callable[..., SharedManager], v1_reference: dict[str, list[int]]
) -> None:
    """The scheduler reaches the second node's manager over TCP. That is killed while requests are answered, and comes
    back empty."""
    listen = f"127.0.0.1:{free_port()}"
    first = shared_manager("--host-blocks", "600")
    second = shared_manager("--host-blocks", "600", "--node-listen", listen)
    engine = over_nodes(first.socket_path, second.socket_path, f"tcp://{listen}", tensor_parallel_size=2)
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
    for manager in (first, back):
        wait_for(
            lambda manager=manager: not manager.metrics()['kvbm_leased_blocks{tier="host"}'],
            10.0,
            "leases stay",
        )


def test_a_node_with_wrong_kv_is_noticed(
    over_nodes: Start, shared_manager: Callable[..., SharedManager], v1_reference: dict[str, list[int]]
) -> None:
    """The negative control: the second node's part of the blocks counts."""
    first, second = (shared_manager("--host-blocks", "600") for _ in range(2))
    engine = over_nodes(first.socket_path, second.socket_path, tensor_parallel_size=2)
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    engine.call(reach.scribble_in_rank, 1, timeout_s=20.0)
    assert len(differences(v1_reference, engine.run(small_workload()))) > 3


def test_stages_on_two_nodes(
    over_nodes: Start, shared_manager: Callable[..., SharedManager], v1_reference: dict[str, list[int]]
) -> None:
    first, second = (shared_manager("--host-blocks", "600") for _ in range(2))
    engine = over_nodes(first.socket_path, second.socket_path, pipeline_parallel_size=2)
    engine.call(pipeline.make_room_between_stages, timeout_s=20.0)
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    for turn in ("", "+"):
        assert differences(v1_reference, engine.run(again(small_workload(), turn)), turn) == []
    assert min(manager.metrics()[LOADED] for manager in (first, second)) > 50
