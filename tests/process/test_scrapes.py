"""The metrics of a manager process, read at once after an engine has said something."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.client.channel import Channel
from kvbm.hashing import join_keys
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    Hello,
    Lookup,
    Message,
    Ready,
    Release,
    Reserve,
    ReserveReply,
)
from rigs.manager import KEYS, worker_hello
from rigs.manager_probe import SharedManager

DEADLINE_S = 60.0
BLOCKS = 4


class Engine:
    """A leader and one rank that copies nothing."""

    def __init__(self, socket_path: str, ends: contextlib.ExitStack) -> None:
        self._leader, worker = (
            ends.enter_context(contextlib.closing(Channel.connect(socket_path))) for _ in "lw"
        )
        self._leader.introduce(Hello(version=PROTOCOL_VERSION, role="leader", engine="e"), DEADLINE_S)
        worker.introduce(worker_hello(), DEADLINE_S)
        self.expect(Ready)

    def expect(self, kind: type[Message]) -> None:
        """The next message of this kind has come."""
        while True:
            assert self._leader.wait(DEADLINE_S), f"no {kind.__name__} came"
            if any(isinstance(message, kind) for message in self._leader.receive()):
                return

    def say(self, message: Message) -> None:
        """Send it, and wait for nothing."""
        self._leader.send(message)


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as ends:
        yield ends


def test_the_first_page_counts_what_was_said_before(tmp_path: Path, ends: contextlib.ExitStack) -> None:
    """Gauges too: ten pages in a row, much faster than the manager's clock ticks."""
    manager = SharedManager(tmp_path, str(tmp_path / "m.sock"), "--host-blocks", str(16 * BLOCKS))
    ends.callback(manager.close)
    engine = Engine(manager.socket_path, ends)
    for number in range(1, 11):
        keys = join_keys(KEYS[(number - 1) * BLOCKS : number * BLOCKS])
        engine.say(Reserve(store=number, parent=b"", keys=keys))
        engine.expect(ReserveReply)
        engine.say(Commit(store=number))
        stored = manager.metrics()
        assert stored["kvbm_offload_blocks_d2h"] == number * BLOCKS
        assert stored['kvbm_pool_blocks{tier="host",state="resident"}'] == number * BLOCKS
        assert stored['kvbm_pool_blocks{tier="host",state="filling"}'] == 0
        engine.say(Lookup(lookup=number, keys=keys))
        assert manager.metrics()["kvbm_leases"] == 1
        engine.say(Release(lookup=number, loaded=BLOCKS, seconds=0.01))
        loaded = manager.metrics()
        assert (loaded["kvbm_onboard_blocks_h2d"], loaded["kvbm_leases"]) == (number * BLOCKS, 0)
