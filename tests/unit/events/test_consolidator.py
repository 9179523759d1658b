"""The consolidator between a real publisher and real subscribers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvbm.events.consolidator import Consolidator, Options, main

SIZE = 2
PATIENCE_MS = 20_000


@dataclass
class Wires:
    """An engine's end, a router's end and the consolidator between them, in one context."""

    context: zmq.Context[Any]
    replays: bool = False
    began: bool = True
    first: int = 0
    """The first message that the engine can still repeat."""
    sent: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = self.context.socket(zmq.XPUB)
        self.engine.bind("inproc://engine")
        options = Options(
            engine="inproc://engine",
            output="inproc://routers",
            replay="inproc://replay" if self.replays else "",
            began=self.began,
        )
        self.consolidator = Consolidator(options, self.context)
        assert self.engine.poll(PATIENCE_MS), "it did not subscribe"
        self.engine.recv()

    def router(self) -> zmq.Socket[Any]:
        """A router that has subscribed, and whom the consolidator has noticed."""
        socket = self.context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect("inproc://routers")
        assert self.consolidator._output.poll(PATIENCE_MS)
        self.consolidator.hear_subscribers()
        return socket

    def publish(self, *events: Any, skipped: int = 0) -> None:
        """One message of the engine's; before it so many that get lost."""
        self.sent += [payload(stored(1000 + len(self.sent) + i)) for i in range(skipped)]
        self.sent.append(payload(*events))
        self.engine.send_multipart([b"topic", (len(self.sent) - 1).to_bytes(8, "big"), self.sent[-1]])
        self.hear()

    def hear(self) -> None:
        assert self.consolidator._engine.poll(PATIENCE_MS)
        self.consolidator.hear_engine()
        self.consolidator.flush()

    def replay_in_background(self) -> threading.Thread:
        """vLLM's side of the replay protocol, for one request."""
        socket = self.context.socket(zmq.ROUTER)
        socket.bind("inproc://replay")

        def serve() -> None:
            if socket.poll(PATIENCE_MS):
                who, _, start = socket.recv_multipart()
                for number in range(max(self.first, int.from_bytes(start, "big")), len(self.sent)):
                    socket.send_multipart([who, b"", number.to_bytes(8, "big"), self.sent[number]])
                socket.send_multipart([who, b"", (-1).to_bytes(8, "big", signed=True), b""])
            socket.close(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        return thread


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode((1.0, events, 0))


def stored(name: int, medium: str = "GPU") -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": [name, name],
        "block_size": SIZE,
        "medium": medium,
    }


def removed(name: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": medium}


def said(router: zmq.Socket[Any], number: int) -> list[tuple[Any, ...]]:
    """What the router reads next, which must be the message of this number."""
    assert router.poll(PATIENCE_MS), "nothing was published"
    topic, sequence, text = router.recv_multipart()
    assert (topic, int.from_bytes(sequence, "big")) == (b"", number)
    seconds, events, rank = msgspec.msgpack.decode(text)
    assert seconds > 0
    assert rank == 0
    return [(each["type"], *each.get("block_hashes", ())) for each in events]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


def test_a_router_follows_a_block_through_the_tiers(context: zmq.Context[Any]) -> None:
    wires = Wires(context)
    router = wires.router()
    wires.publish(stored(1), stored(1, "CPU"))
    wires.publish(removed(1))
    wires.publish(removed(1, "CPU"), stored(2))
    assert said(router, 0) == [("BlockStored", 1)]
    assert said(router, 1) == [("BlockRemoved", 1), ("BlockStored", 2)]


def test_a_router_that_comes_late_is_told_everything(context: zmq.Context[Any]) -> None:
    wires = Wires(context)
    wires.publish(stored(1), stored(2))
    wires.publish(removed(2))
    first = wires.router()
    assert said(first, 2) == [("AllBlocksCleared",), ("BlockStored", 1)]
    second = wires.router()
    assert said(second, 3) == [("AllBlocksCleared",), ("BlockStored", 1)]
    assert said(first, 3) == [("AllBlocksCleared",), ("BlockStored", 1)]


def test_a_first_router_of_an_empty_cache_is_told_nothing(context: zmq.Context[Any]) -> None:
    wires = Wires(context)
    router = wires.router()
    wires.publish(stored(1))
    assert said(router, 0) == [("BlockStored", 1)]


def test_after_a_restart_a_router_forgets_what_this_process_does_not_know(context: zmq.Context[Any]) -> None:
    router = Wires(context, began=False).router()
    assert said(router, 0) == [("AllBlocksCleared",)]


def test_lost_messages_are_asked_for(context: zmq.Context[Any]) -> None:
    wires = Wires(context, replays=True)
    router = wires.router()
    wires.publish(stored(1))
    thread = wires.replay_in_background()
    wires.publish(stored(2), skipped=2)
    thread.join()
    assert said(router, 0) == [("BlockStored", 1)]
    assert said(router, 1) == [("BlockStored", 1001), ("BlockStored", 1002), ("BlockStored", 2)]


@pytest.mark.parametrize("first", [0, 2])
def test_what_came_before_it_began_is_asked_for(context: zmq.Context[Any], first: int) -> None:
    """Or what the engine still has of it."""
    wires = Wires(context, replays=True, first=first)
    router = wires.router()
    thread = wires.replay_in_background()
    wires.publish(stored(1), skipped=4)
    thread.join()
    earlier = [("BlockStored", 1000 + number) for number in range(first, 4)]
    assert said(router, 0) == [*earlier, ("BlockStored", 1)]


def test_a_start_in_the_middle_is_told(context: zmq.Context[Any], caplog: pytest.LogCaptureFixture) -> None:
    wires = Wires(context)
    wires.publish(stored(1), skipped=4)
    wires.publish(stored(2), skipped=0)
    (record,) = caplog.records
    assert record.getMessage().startswith("4 earlier messages of KV events are not to be had")


def test_a_new_process_learns_what_the_earlier_one_knew(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """At once, and not when the engine has more to say; what comes both ways counts once."""
    wires = Wires(context, replays=True, began=False)
    wires.sent += [payload(stored(1)), payload(stored(2))]
    thread = wires.replay_in_background()
    wires.consolidator.learn_anew()
    thread.join()
    router = wires.router()
    assert said(router, 0) == [("BlockStored", 1), ("BlockStored", 2)]
    wires.engine.send_multipart([b"", (1).to_bytes(8, "big"), wires.sent[1]])
    wires.hear()
    wires.publish(removed(1))
    assert said(router, 1) == [("AllBlocksCleared",), ("BlockStored", 1), ("BlockStored", 2)]
    assert said(router, 2) == [("BlockRemoved", 1)]


def test_messages_lost_for_good_make_routers_forget(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    wires = Wires(context)
    router = wires.router()
    wires.publish(stored(1))
    wires.publish(stored(2), skipped=3)
    assert said(router, 0) == [("BlockStored", 1)]
    assert said(router, 1) == [("AllBlocksCleared",), ("BlockStored", 2)]
    assert "3 messages of KV events were lost" in caplog.text


def test_an_engine_that_counts_anew_holds_nothing(context: zmq.Context[Any]) -> None:
    wires = Wires(context)
    router = wires.router()
    wires.publish(stored(1))
    wires.publish(stored(2))
    wires.sent.clear()
    wires.publish(stored(3))
    assert [said(router, number) for number in range(3)] == [
        [("BlockStored", 1)],
        [("BlockStored", 2)],
        [("AllBlocksCleared",), ("BlockStored", 3)],
    ]


def test_what_cannot_be_read_is_told_and_passed_over(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    wires = Wires(context)
    router = wires.router()
    wires.engine.send_multipart([b"", b"\0"])
    wires.hear()
    wires.publish(stored(1), {"type": "BlockStored"})
    wires.publish(stored(2))
    assert said(router, 0) == [("BlockStored", 1)]
    assert said(router, 1) == [("BlockStored", 2)]
    assert "is no KV event" in caplog.text
    assert "a KV event cannot be read" in caplog.text


def test_it_runs_until_its_input_ends(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """The loop itself, with sockets of files; what came is published before it ends."""
    engine = context.socket(zmq.XPUB)
    engine.bind(f"ipc://{tmp_path}/engine")
    options = Options(engine=f"ipc://{tmp_path}/engine", output=f"ipc://{tmp_path}/out")
    consolidator = Consolidator(options, context)
    reader, writer = os.pipe()
    loop = threading.Thread(target=consolidator.run, args=(reader,))
    loop.start()
    assert engine.poll(PATIENCE_MS)
    engine.recv()
    engine.send_multipart([b"", bytes(8), payload(stored(1))])
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    router.connect(f"ipc://{tmp_path}/out")
    assert router.poll(PATIENCE_MS), "nothing was published"
    *_, text = router.recv_multipart()
    assert msgspec.msgpack.decode(text)[1][-1]["block_hashes"] == [1]
    os.close(writer)
    loop.join(PATIENCE_MS / 1000)
    assert not loop.is_alive()
    os.close(reader)
    consolidator.close()


def test_an_address_that_is_taken_is_told(
    tmp_path: Path, context: zmq.Context[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    options = Options(engine=f"ipc://{tmp_path}/engine", output=f"tcp://127.0.0.1:{port}")
    assert main([msgspec.json.encode(options).decode()]) == 1
    assert f"cannot listen at tcp://127.0.0.1:{port}" in capsys.readouterr().err
    logging.getLogger("kvbm").handlers.clear()
    logging.getLogger("kvbm").propagate = True
