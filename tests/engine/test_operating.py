"""What an operator reads in a shell behind a real engine is what the engine and its manager counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.engine_child import KV_CONNECTOR
from engine.launcher import Launcher
from engine.tier_settings import BLOCK_BYTES, SMALL_HOST_BLOCKS, disk
from engine.workload import BLOCK_TOKENS, Request, small_workload
from rigs.admin import Node
from rigs.manager_probe import wait_for

ENGINE = "engine-of-this-test"


def prompt_tokens(requests: list[Request], outputs: dict[str, list[int]]) -> dict[str, int]:
    """The prompts' lengths: a request goes on where its parent's answer ended."""
    lengths: dict[str, int] = {}
    for request in requests:  # parents come first
        said = lengths[request.parent] + len(outputs[request.parent]) if request.parent else 0
        lengths[request.name] = said + len(request.tokens)
    return lengths


def test_what_commands_say_of_an_engine(launcher: Launcher, tmp_path: Path) -> None:
    engine = launcher.start(disk(tmp_path / "disk", SMALL_HOST_BLOCKS), {**KV_CONNECTOR, "engine_id": ENGINE})
    requests = [request for request in small_workload() if request.abort_after is None]
    # One at a time: none is preempted, so that the engine's count for each is of one look-up.
    answers = engine.run(requests, concurrency=1)
    launcher.assert_nothing_held()
    node = Node(tmp_path)
    node.set(runtime_dir=launcher.runtime_dir)  # all that an operator's shell may have to know

    def written() -> bool:
        (queue,) = node.json("inspect", "queues")["queues"]
        return (queue["onboard_blocks"], queue["offload_blocks"], queue["reservations"]) == (0, 0, 0)

    wait_for(written, 20.0, "blocks are still on their way to disk")
    (manager,) = node.json("status")["managers"]
    (seen,) = manager["description"]["engines"]
    assert (manager["faults"], seen["engine"], seen["ranks"], seen["led"]) == ([], ENGINE, [0], True)
    (space,) = manager["description"]["spaces"]

    known = node.json("why", "--limit", "256")["requests"]
    why: dict[str, Any] = {}
    lengths = prompt_tokens(requests, answers.outputs)
    for name, cached in answers.cached_tokens.items():
        # vLLM adds digits of its own to the id that its API gave.
        found = [entry for entry in known if entry["request"].startswith(name)]
        if not found:
            whole_blocks = lengths[name] // BLOCK_TOKENS
            assert cached == whole_blocks * BLOCK_TOKENS, "nothing was left to look up"
            continue
        (why[name],) = found
        assert (why[name]["device"] + why[name]["loaded"]) * BLOCK_TOKENS == cached, why[name]
    assert len(why) == len(known) > len(requests) // 2
    chosen = max(why, key=lambda name: why[name]["loaded"])
    (alone,) = node.json("why", chosen)["requests"]
    told = {name: value for name, value in alone.items() if name != "seconds_ago"}
    assert told == {name: why[chosen][name] for name in told}
    assert node.kvbm("why", chosen)[1].startswith(chosen)

    loaded = sum(entry["loaded"] for entry in known)
    top = node.json("top", "--once", "--since-start")
    assert [shown["engine"] for shown in top["engines"]] == [ENGINE]
    assert top["loaded"] == loaded * BLOCK_TOKENS
    metrics = launcher.metrics()
    moved = {(flow["source"], flow["target"]): flow["bytes_moved"] for flow in top["flows"]}
    for (source, target), moved_bytes in moved.items():
        series = f'kvbm_transfer_bytes_total{{source="{source}",target="{target}"}}'
        assert moved_bytes == metrics[series] > 0, series
    assert moved["host", "device"] == loaded * BLOCK_BYTES > 0

    for label, tier in zip(("G2", "G3"), space["tiers"], strict=True):
        blocks = node.json("inspect", "blocks", "--tier", label, "--limit", "1000")["blocks"]
        assert len(blocks) == tier["resident"] > 0
        assert {block["state"] for block in blocks} == {"resident"}
    (named,) = node.json("inspect", "namespaces")["namespaces"]
    assert (named["namespace"], named["block_tokens"]) == (space["namespace"], BLOCK_TOKENS)
    assert node.json("inspect", "leases")["leases"] == []
