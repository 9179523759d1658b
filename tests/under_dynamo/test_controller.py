"""The original's controller, on Dynamo's own runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pytest

from kvbm.dynamo_runtime import controller
from rigs.dynamo import BLOCKS, Start, ask, counted, prompts
from rigs.manager_probe import wait_for

pytestmark = pytest.mark.timeout(300)

CLIENT = """
import asyncio, json, sys
from dynamo.runtime import DistributedRuntime

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint("dynamo.kvbm.controller").client()
    await client.wait_for_instances()
    answers = []
    for request in json.loads(sys.argv[1]):
        async for answer in await client.round_robin(request):
            answers.append(answer.data())
    print(json.dumps(answers))
    runtime.shutdown()

asyncio.run(main())
"""


def answers(discovery: Mapping[str, str], *requests: object) -> list[Any]:
    """What the controller says to a client of its own process."""
    told = subprocess.run(
        [sys.executable, "-c", CLIENT, json.dumps(requests)],
        env={**os.environ, **discovery},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    found: list[Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def test_status_and_resets_through_the_runtime(start: Start) -> None:
    with start("agg_kvbm.sh", {"backend": 1}, DYN_RUNTIME_ENABLED_KVBM="true") as stack:
        ask(stack, prompts(0, 1)[0])
        wait_for(
            lambda: counted(stack, "kvbm_offload_blocks_d2h") == BLOCKS, 20.0, "the blocks are not stored"
        )
        status = {"Status": "G2"}
        before, refused, reset, after = answers(
            stack.discovery, status, {"Status": "G1"}, {"ResetPool": "G2"}, status
        )
        assert (before["active_blocks"], before["inactive_blocks"]) == (0, BLOCKS)
        assert "/reset_prefix_cache" in refused["Error"]
        assert reset == {"ResetPool": None}
        assert after == {
            "active_blocks": 0,
            "inactive_blocks": 0,
            "empty_blocks": before["empty_blocks"] + BLOCKS,
        }
        (child,) = controllers(stack.runtime_dir)
        child.kill()
        wait_for(lambda: controllers(stack.runtime_dir) not in ([], [child]), 20.0, "it stays away")
        wait_for(answering(stack.discovery), 60.0, "the new one does not answer")


def answering(discovery: Mapping[str, str]) -> Callable[[], bool]:
    """The killed one's place in the runtime's register is not empty at once."""

    def one() -> bool:
        try:
            return answers(discovery, "ResetAll") == [{"ResetAll": None}]
        except (AssertionError, subprocess.TimeoutExpired):
            return False

    return one


def controllers(runtime_dir: str) -> list[psutil.Process]:
    """Those of managers with their sockets in this directory. A private manager has left its engine's family."""
    found = list[psutil.Process]()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if controller.__name__ in words and any(word.startswith(runtime_dir) for word in words):
            found.append(process)
    return found
