"""A manager whose disk does not answer, as a process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TypeVar

import msgspec

from kvbm.block import BlockKey
from kvbm.client.channel import Channel
from kvbm.hashing import chain_keys, join_keys
from kvbm.protocol import PROTOCOL_VERSION, Commit, Hello, Message, Ready, Reserve, ReserveReply
from kvbm.tiers.disk.tier import open_disk_tier
from rigs.manager import LAYOUT, NAMESPACE, worker_hello
from rigs.manager_probe import SharedManager, wait_for

DEADLINE_S = 60.0
ENDED_S = 20.0
"""Less than the half minute that such a manager once took; a loaded machine may need some of it."""
KEYS = chain_keys(bytes(32), range(32), LAYOUT.block_tokens)

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def ask(channel: Channel, message: Message | None, kind: type[MessageT]) -> MessageT:
    """Send a message and wait for one of this kind."""
    found: list[MessageT] = []
    if message is not None:
        channel.send(message)

    def came() -> bool:
        channel.wait(0.1)
        found.extend(each for each in channel.receive() if isinstance(each, kind))
        return bool(found)

    wait_for(came, DEADLINE_S, f"no {kind.__name__}")
    return found[0]


def store(leader: Channel, number: int, keys: list[BlockKey]) -> None:
    ask(leader, Reserve(store=number, parent=b"", keys=join_keys(keys)), ReserveReply)
    leader.send(Commit(store=number))


def test_sigterm_ends_a_manager_whose_disk_is_stuck_and_leaves_whole_blocks(tmp_path: Path) -> None:
    stuck, disk = tmp_path / "stuck", tmp_path / "disk"
    child = str(Path(__file__).with_name("stuck_disk_child.py"))
    options = (
        "--host-blocks",
        "16",
        "--disk-blocks",
        "16",
        "--disk-dir",
        str(disk),
        "--disk-admission",
        "all",
    )
    manager = SharedManager(
        tmp_path,
        str(tmp_path / "run" / "m.sock"),
        *options,
        "--metrics-host",
        "127.0.0.1",
        start=(child, str(stuck)),
    )
    leader, worker = Channel.connect(manager.socket_path), Channel.connect(manager.socket_path)
    try:
        leader.send(Hello(version=PROTOCOL_VERSION, role="leader", engine="e"))
        worker.introduce(worker_hello(), DEADLINE_S)
        ask(leader, None, Ready)
        store(leader, 1, KEYS[:4])
        on_disk = 'kvbm_pool_blocks{tier="disk",state="resident"}'
        wait_for(lambda: manager.metrics()[on_disk] == 4, DEADLINE_S, lambda: str(manager.metrics()))
        stuck.touch()
        store(leader, 2, KEYS[4:])
        wait_for(lambda: "disk tier is slow" in manager.log(), DEADLINE_S, manager.log)
        os.kill(manager.pid, signal.SIGTERM)
        wait_for(lambda: not manager.alive, ENDED_S, manager.log)
    finally:
        leader.close()
        worker.close()
        manager.kill()
    tier = open_disk_tier(disk, LAYOUT, NAMESPACE, capacity_blocks=16)
    assert {block.key for block in tier.recovered()} == set(KEYS[:4])
    tier.close(keep=False)
