"""Writes a recording from the messages that a manager sends its followers."""

from __future__ import annotations

from typing import IO

from kvbm.block import BlockKey
from kvbm.hashing import split_keys
from kvbm.protocol import Asked, Ended, Message
from kvbm.sim.traces.formats import RecordingWriter

RUNNING_MAX = 100_000


class Recorder:
    """Turns the messages to a manager's followers into lines of a recording, for one namespace.

    A request is written when it ends, or by `close`. One that is asked for again before it ends (it was preempted, or
    looked up once more) is one request; of those that never end the oldest is written when there are `RUNNING_MAX`.
    """

    def __init__(self, file: IO[bytes], namespace: str = "") -> None:
        self.written = 0
        self.others = 0
        self.model = ""
        self._file = file
        self._namespace = namespace
        self._fingerprint = b""
        self._unflushed = False
        self._writer: RecordingWriter | None = None
        self._block_tokens = 0
        self._start_s = 0.0
        self._running: dict[BlockKey, tuple[float, list[BlockKey]]] = {}

    def receive(self, message: Message) -> None:
        """Take one message; messages that are not about requests are ignored."""
        if isinstance(message, Asked):
            if self._writer is None and message.fingerprint.hex().startswith(self._namespace):
                self._begin(message)
            if message.fingerprint != self._fingerprint:
                self.others += 1
                return
            keys = split_keys(message.keys)
            if keys and keys[-1] not in self._running:
                self._running[keys[-1]] = (message.at_s, keys)
            if len(self._running) > RUNNING_MAX:
                self._write(next(iter(self._running)), 0, None)
        elif isinstance(message, Ended):
            key = BlockKey(message.key)
            if message.fingerprint == self._fingerprint and key in self._running:
                self._write(key, message.output_tokens, message.at_s)

    def flush(self) -> None:
        """Hand what is written to the file system: a reader finds it there even if this process is killed."""
        if self._unflushed:
            self._file.flush()
            self._unflushed = False

    def close(self) -> None:
        """Write the requests that have not ended."""
        for key in list(self._running):
            self._write(key, 0, None)
        self.flush()

    def _begin(self, message: Asked) -> None:
        self._fingerprint, self.model = message.fingerprint, message.model
        self._block_tokens, self._start_s = message.block_tokens, message.at_s
        self._writer = RecordingWriter(self._file, message.block_tokens, message.fingerprint)

    def _write(self, key: BlockKey, output_tokens: int, ended_s: float | None) -> None:
        at_s, keys = self._running.pop(key)
        assert self._writer is not None
        self._writer.add(
            at_s - self._start_s,
            keys,
            prompt_tokens=len(keys) * self._block_tokens,
            output_tokens=output_tokens,
            seconds=None if ended_s is None else max(0.0, ended_s - at_s),
        )
        self.written += 1
        self._unflushed = True
