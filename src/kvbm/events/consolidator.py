"""The KV event consolidator: hears an engine's events, which tell of its device and of our tiers, and publishes them as
one account to routers.

Run as a child of the engine's process, because an engine's own thread has no time to spare: it ends when its input
ends. A subscriber that comes, or comes back, is told of everything that is held, so none is ever too late.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from typing import Any, get_args

import msgspec
import zmq

from kvbm.events.merge import Merge, Mode
from kvbm.events.wire import SEQUENCE_BYTES, Cleared, WireError, encode, events_in
from kvbm.observe.log import configure

log = logging.getLogger("kvbm.consolidator")

FLUSH_MS = 50
"""Events wait so long for company."""
QUEUE_MAX = 100_000
"""Messages that wait in a socket. A subscriber that reads more slowly loses some."""
MESSAGES_AT_ONCE = 256
REPLAY_WAIT_MS = 3000
_NUMBER_MAX = (1 << 63) - 1


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is started with. `engine` is where the engine publishes, `replay` where it repeats what was
    missed (empty: nowhere), `output` where routers listen. `began` tells the first start from the later ones."""

    engine: str
    output: str
    mode: Mode = "dedup"
    replay: str = ""
    log_level: str = "info"
    began: bool = True

    def __post_init__(self) -> None:
        assert self.mode in get_args(Mode)


class Consolidator:
    """One engine's stream and the account of it. Owned by one thread; raises zmq.ZMQError where it cannot listen."""

    def __init__(self, options: Options, context: zmq.Context[Any]) -> None:
        self._options = options
        self._context = context
        self._merge = Merge(options.mode)
        self._expected: int | None = None
        self._repeated = 0
        self._published = 0
        # A router may know what an earlier process said, and this one does not.
        self._resume = not options.began
        self._output = context.socket(zmq.XPUB)
        self._output.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._output.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        self._output.setsockopt(zmq.LINGER, 0)
        try:
            self._output.bind(options.output)
        except zmq.ZMQError:
            self._output.close()
            raise
        self._engine = context.socket(zmq.SUB)
        self._engine.setsockopt(zmq.RCVHWM, QUEUE_MAX)
        self._engine.setsockopt(zmq.LINGER, 0)
        self._engine.setsockopt(zmq.SUBSCRIBE, b"")
        self._engine.connect(options.engine)
        self._poller = zmq.Poller()
        for each in (self._engine, self._output):
            self._poller.register(each, zmq.POLLIN)

    def run(self, input_fd: int) -> None:
        """Until the input ends."""
        self._poller.register(input_fd, zmq.POLLIN)
        if not self._options.began:
            self.learn_anew()
        flush_at = float("inf")
        while True:
            left_s = flush_at - time.monotonic()
            wait_ms = None if left_s == float("inf") else max(0, math.ceil(left_s * 1000))
            ready = dict(self._poller.poll(wait_ms))
            if input_fd in ready and not os.read(input_fd, 1):
                return
            if self._output in ready:
                self.hear_subscribers()
            if self._engine in ready:
                self.hear_engine()
            if self._merge.waiting and flush_at == float("inf"):
                flush_at = time.monotonic() + FLUSH_MS / 1000
            if time.monotonic() >= flush_at:
                self.flush()
                flush_at = float("inf")

    def learn_anew(self) -> None:
        """Take in what the engine published while no consolidator ran, as far as it still has that."""
        following = self._repeat(None, _NUMBER_MAX)
        if following is not None:
            self._expected = self._repeated = following

    def hear_subscribers(self) -> None:
        """Tell those who have come of everything that is held."""
        came = False
        while self._output.poll(0):
            came = self._output.recv()[:1] == b"\1" or came
        if came:
            self.flush()
            if len(self._merge) or self._resume:
                self._publish(self._merge.snapshot())
            self._resume = False

    def hear_engine(self) -> None:
        """Take in what has come, some at a time."""
        for _ in range(MESSAGES_AT_ONCE):
            if not self._engine.poll(0):
                return
            frames = self._engine.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
                log.warning(
                    "a message of %d frames from %s is no KV event", len(frames), self._options.engine
                )
                continue
            self._take_in(int.from_bytes(frames[1], "big"), frames[2])

    def flush(self) -> None:
        """Publish what has come."""
        if self._merge.waiting:
            self._publish(self._merge.drain())

    def close(self) -> None:
        """Hang up on both sides."""
        self.flush()
        self._engine.close()
        self._output.close()

    def _take_in(self, number: int, payload: bytes) -> None:
        expected = self._expected
        if number < self._repeated:
            return  # it came both ways
        self._repeated = 0
        if expected is None:
            if number and self._repeat(None, number) != number:
                log.warning(
                    "%d earlier messages of KV events are not to be had: routers hear of their blocks when these are "
                    "stored again. vLLM repeats what was missed at `replay_endpoint` of --kv-events-config",
                    number,
                )
        elif number < expected:
            log.warning("the engine counts its KV events anew: %d after %d", number, expected - 1)
            self._merge.take_in(Cleared())
        elif number > expected and self._repeat(expected, number) != number:
            log.warning(
                "%d messages of KV events were lost: routers forget this engine's blocks", number - expected
            )
            self._merge.take_in(Cleared())
        self._expected = number + 1
        self._merge_in(payload)

    def _repeat(self, start: int | None, end: int) -> int | None:
        """Take in the messages before number `end` from where the engine repeats them, from `start` on, or from the
        first that it still has. The number that follows on them; None without any."""
        if not self._options.replay:
            return None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._options.replay)
        socket.send_multipart([b"", (start or 0).to_bytes(SEQUENCE_BYTES, "big")])
        following = start
        while (following is None or following < end) and socket.poll(REPLAY_WAIT_MS):
            frames = socket.recv_multipart()
            number = int.from_bytes(frames[-2], "big", signed=True)
            if not 0 <= number < end or following not in (None, number):
                break
            self._merge_in(frames[-1])
            following = number + 1
        socket.close()
        return following

    def _merge_in(self, payload: bytes) -> None:
        try:
            for event in events_in(payload):
                self._merge.take_in(event)
        except WireError as error:
            log.warning("%s", error)

    def _publish(self, events: list[dict[str, Any]]) -> None:
        log.debug("Publishing %d consolidated event(s) to router", len(events))
        payload = encode(time.time(), events)
        self._output.send_multipart((b"", self._published.to_bytes(SEQUENCE_BYTES, "big"), payload))
        self._published += 1


def main(words: list[str]) -> int:
    """`words`: the options as JSON. Ends with its input; 1 where it cannot listen."""
    options = msgspec.json.decode(words[0], type=Options)
    configure(options.log_level)
    log.info(
        "Starting KV Event Consolidator: subscribe from %s, publish to %s, mode %s",
        options.engine,
        options.output,
        options.mode,
    )
    context: zmq.Context[Any] = zmq.Context()
    try:
        consolidator = Consolidator(options, context)
    except zmq.ZMQError as error:
        log.warning("the KV event consolidator cannot listen at %s: %s", options.output, error)
        context.term()
        return 1
    log.info("KV event consolidator ZMQ listener successfully connected to %s", options.engine)
    log.info("KV Event Consolidator fully started and ready")
    try:
        consolidator.run(sys.stdin.fileno())
    except KeyboardInterrupt:  # the terminal's, for the engine: its end is ours
        pass
    finally:
        consolidator.close()
        context.term()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
