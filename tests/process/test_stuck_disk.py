"""A manager whose disk does not answer, as a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from kvbm.block import BlockKey
from kvbm.client.channel import Channel
from kvbm.hashing import chain_keys, join_keys
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    Hello,
    Message,
    Ready,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
)
from kvbm.settings.places import default_runtime_dir
from kvbm.tiers.disk.tier import open_disk_tier
from rigs.manager import LAYOUT, NAMESPACE, worker_hello
from rigs.manager_probe import SharedManager, wait_for

DEADLINE_S = 60.0
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


class StuckDisk:
    """A manager with an engine. Four of its blocks are on disk, others on their way there, and writes do not end."""

    def __init__(self, directory: Path) -> None:
        stuck, self.root = directory / "stuck", directory / "disk"
        child = str(Path(__file__).with_name("stuck_disk_child.py"))
        self.manager = SharedManager(
            directory,
            str(directory / "run" / "m.sock"),
            *("--host-blocks", "16", "--disk-blocks", "16", "--disk-dir", str(self.root)),
            *("--disk-admission", "all", "--metrics-host", "127.0.0.1"),
            start=(child, str(stuck), str(self.root)),
        )
        self.leader = Channel.connect(self.manager.socket_path)
        self.worker = Channel.connect(self.manager.socket_path)
        self.leader.send(Hello(version=PROTOCOL_VERSION, role="leader", engine="e"))
        self.worker.introduce(worker_hello(), DEADLINE_S)
        ask(self.leader, None, Ready)
        store(self.leader, 1, KEYS[:4])
        wait_for(lambda: self.resident == 4, DEADLINE_S, self.manager.log)
        stuck.touch()
        store(self.leader, 2, KEYS[4:])
        wait_for(lambda: "disk tier is slow" in self.manager.log(), DEADLINE_S, self.manager.log)

    @property
    def resident(self) -> float:
        return self.manager.metrics()['kvbm_pool_blocks{tier="disk",state="resident"}']

    def close(self) -> None:
        self.leader.close()
        self.worker.close()
        self.manager.kill()

    def keys_left(self) -> set[BlockKey]:
        """The blocks that the next manager finds, on a disk that works again."""
        notes_dir = Path(default_runtime_dir())
        tier = open_disk_tier(self.root, LAYOUT, NAMESPACE, capacity_blocks=16, notes_dir=notes_dir)
        found = {block.key for block in tier.recovered()}
        tier.close(keep=False)
        return found


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckDisk]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    disk = StuckDisk(tmp_path)
    yield disk
    disk.close()


def test_sigterm_ends_a_manager_whose_disk_is_stuck_and_leaves_whole_blocks(stuck: StuckDisk) -> None:
    os.kill(stuck.manager.pid, signal.SIGTERM)
    wait_for(lambda: not stuck.manager.alive, DEADLINE_S, stuck.manager.log)
    assert stuck.keys_left() == set(KEYS[:4])


def test_blocks_of_a_reset_are_not_found_after_the_manager_was_killed(stuck: StuckDisk) -> None:
    """The disk could not record it."""
    reply = ask(stuck.leader, Reset(tier="disk"), ResetReply)
    assert (reply.dropped, reply.undone) == (4, "")
    stuck.manager.kill()
    assert stuck.keys_left() == set()
