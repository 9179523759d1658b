"""`kvbm resize`, as an operator runs it against a manager that serves engines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.admin_protocol import Describe, Description, Resize
from kvbm.client.admin import Admin
from kvbm.settings import Settings
from rigs.admin import Node
from rigs.manager import KEYS, LAYOUT, NAMESPACE, OTHER
from rigs.manager_probe import wait_for

BLOCK = LAYOUT.block_bytes
END_S = 60.0


@pytest.mark.parametrize("blocks", [12, 64])
def test_host_memory_changes_its_size_and_keeps_blocks(make_node: Callable[..., Node], blocks: int) -> None:
    node = make_node()
    path = node.manage()
    engine = node.engine(path)
    engine.store(KEYS[:8])
    reply = node.json("resize", "--host", str(blocks * BLOCK))
    assert reply["seconds"] >= 0.0
    del reply["seconds"]
    assert reply == {
        "manager": path,
        "before_bytes": 16 * BLOCK,
        "after_bytes": blocks * BLOCK,
        "blocks_before": 8,
        "carried": 8,
        "dropped": 0,
        "pins_ended": 0,
        "slots": blocks,
    }
    again = node.engine(path, "engine-2")
    assert again.welcome.slot_count == blocks
    assert len(again.lookup(KEYS[:8]).slots) == 8
    # The first one's sessions were ended, and it does not come back: that is a fault, and the exit status is 1.
    (manager,) = json.loads(node.kvbm("status", "--json")[1])["managers"]
    (space,) = manager["description"]["spaces"]
    assert [tier["blocks"] for tier in space["tiers"] if tier["tier"] == "host"] == [blocks]


def test_it_says_what_became_of_the_blocks_and_how_long_it_holds(make_node: Callable[..., Node]) -> None:
    node = make_node()
    engine = node.engine(node.manage())
    engine.store(KEYS[:10])
    engine.close()
    code, out, err = node.kvbm("resize", "--host", f"{6 * BLOCK}B")
    assert (code, err) == (0, "")
    for words in (
        "G2 host:",
        "(6 blocks)",
        "6 of 10 blocks carried over",
        "4 blocks were dropped",
        "settings",
    ):
        assert words in out, out


def test_a_manager_without_engines_takes_the_size_for_the_first(make_node: Callable[..., Node]) -> None:
    node = make_node()
    path = node.manage()
    assert "none has connected yet" in node.kvbm("resize", "--host", str(7 * BLOCK))[1]
    assert node.engine(path).welcome.slot_count == 7


def test_for_a_script_the_size_for_the_first_engine_is_the_size_after(make_node: Callable[..., Node]) -> None:
    node = make_node(host_blocks="", host_bytes=f"{9 * BLOCK / 1e9:.9f}")
    node.manage()
    reply = node.json("resize", "--host", str(7 * BLOCK))
    assert (reply["before_bytes"], reply["after_bytes"], reply["slots"]) == (9 * BLOCK, 7 * BLOCK, 0)


@pytest.mark.parametrize("size", ["0", "-1GB", "much", "4XB", ""])
def test_a_size_that_is_none_is_one_line(make_node: Callable[..., Node], size: str) -> None:
    node = make_node()
    node.manage()
    assert node.refused("resize", f"--host={size}").startswith(f"kvbm: --host={size!r} cannot be used: ")


def test_what_cannot_be_had_is_one_line_and_changes_nothing(make_node: Callable[..., Node]) -> None:
    node = make_node()
    path = node.manage("m.sock", "--namespaces", "2")
    node.engine(path).store(KEYS[:8])
    assert "GB of memory in all" in node.refused("resize", "--host", "4096TB")
    assert f"at least one block of {BLOCK} bytes" in node.refused("resize", "--host", f"{BLOCK}B")
    assert node.engine(path, "engine-2", OTHER).welcome.slot_count == 8
    assert len(node.engine(path, "engine-3", NAMESPACE).lookup(KEYS[:8]).slots) == 8


def test_without_a_manager_it_is_one_line(make_node: Callable[..., Node]) -> None:
    assert "no manager runs" in make_node().refused("resize", "--host", "1GB")


ENGINE = """
import sys, time
from pathlib import Path
from rigs.admin import Engine
from rigs.manager import KEYS
engine = Engine(sys.argv[1], "victim")
engine.store(KEYS[:8])
print("stored", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed_first", [True, False])
def test_an_engine_that_is_killed_around_it_costs_no_block(
    make_node: Callable[..., Node], killed_first: bool
) -> None:
    """The manager finds both at once, the end of the engine's sessions and the resize, in either order."""
    node = make_node()
    path = node.manage()
    command = [sys.executable, "-c", ENGINE, path]
    environment = {**node.environment, "PYTHONPATH": ":".join(filter(None, sys.path))}
    victim = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    manager, settings = node.managers[0], Settings(manager=path)
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "stored\n"
        with Admin(path, settings) as admin:
            manager.send_signal(signal.SIGSTOP)
            wait_for(lambda: state_of(manager.pid) == "T", END_S, "the manager goes on")
            if killed_first:
                victim.kill()
                victim.wait()
            admin._channel.send(Resize(host_bytes=64 * BLOCK))
            victim.kill()
            victim.wait()
            manager.send_signal(signal.SIGCONT)
            reply = admin.ask(Describe(), Description, END_S)
            assert [space.tiers[0].blocks for space in reply.spaces] == [64]
            assert [space.tiers[0].resident for space in reply.spaces] == [8]
    finally:
        manager.send_signal(signal.SIGCONT)
        victim.kill()
        victim.communicate(timeout=60)
    engine = node.engine(path, "engine-2")
    assert engine.welcome.slot_count == 64
    assert len(engine.lookup(KEYS[:8]).slots) == 8


def state_of(pid: int) -> str:
    """The state of a process, as the kernel names it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
