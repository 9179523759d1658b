"""An engine that serves requests with shared prefixes, as fast as the manager lets it, in a thread of its own.

It speaks the protocol and moves bytes as a leader and a rank do; what it says of prefill times is made up.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import deque
from typing import Any

from kvbm.errors import ManagerUnavailable
from kvbm.hashing import chain_keys, join_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.protocol import Commit, Lookup, LookupReply, Progress, Release, Reserve, ReserveReply
from rigs.admin import DEADLINE_S, Engine

BLOCK_TOKENS = 16
PREFILL_S = 0.012
"""What the engine says that a block would have cost."""


class BusyEngine:
    """Requests come `per_s` a second at most. Each begins with one of `prefixes` system prompts, most with the first
    ones, and ends with blocks of its own."""

    def __init__(
        self,
        socket_path: str,
        name: str,
        namespace: Namespace,
        block_bytes: int = 4096,
        prefixes: int = 24,
        per_s: float = 30.0,
        seed: int = 0,
    ) -> None:
        layout = BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=block_bytes)
        self._engine = Engine(socket_path, name, namespace, layout=layout, request_blocks=128)
        self._fingerprint = namespace.fingerprint
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(48 + 16 * (i % 4)) for i in range(prefixes)]
        self._pause_s = 1.0 / per_s
        self._stop = threading.Event()
        self._inbox: deque[Any] = deque()
        self._thread = threading.Thread(target=self._run, name="busy-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and leave."""
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self._engine.close()

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.wait(self._pause_s):
                number += 1
                self._serve(number)
        except ManagerUnavailable:
            pass  # a test ends the manager under it

    def _expect(self, kind: type[Any]) -> Any:
        """The next message of this kind. One of another request may come between."""
        while self._inbox or self._engine.leader.wait(DEADLINE_S):
            self._inbox += self._engine.leader.receive()
            while self._inbox:
                if isinstance(message := self._inbox.popleft(), kind):
                    return message
            if self._stop.is_set():
                break
        raise AssertionError(f"no {kind.__name__} came")

    def _tokens(self, blocks: int) -> list[int]:
        return [self._random.randrange(100_000) for _ in range(blocks * BLOCK_TOKENS)]

    def _serve(self, number: int) -> None:
        """One request from its lookup to its last store."""
        leader, began_s = self._engine.leader, time.monotonic()
        chosen = min(int(self._random.paretovariate(0.8)) - 1, len(self._prefixes) - 1)
        tokens = self._prefixes[chosen] + self._tokens(self._random.randrange(2, 10))
        keys = list(chain_keys(self._fingerprint, tokens, BLOCK_TOKENS))
        request = f"cmpl-{secrets.token_hex(8)}-0"
        leader.send(Lookup(lookup=number, keys=join_keys(keys), request=request, prompt=keys[0]))
        reply: LookupReply = self._expect(LookupReply)
        loaded, answer_s = len(reply.slots), time.monotonic() - began_s
        if reply.ready < loaded:
            while not (progress := self._expect(Progress)).final:
                pass
            loaded = progress.ready
        wait_s = time.monotonic() - began_s
        leader.send(
            Release(
                lookup=number,
                loaded=loaded,
                seconds=max(wait_s, 1e-4),
                answer_s=answer_s,
                wait_s=wait_s,
                prefill_s=loaded * PREFILL_S,
            )
        )
        self._store(number, keys, loaded)

    def _store(self, number: int, keys: list[bytes], loaded: int) -> None:
        parent = keys[loaded - 1] if loaded else b""
        self._engine.leader.send(Reserve(store=number, parent=parent, keys=join_keys(keys[loaded:])))
        reply: ReserveReply = self._expect(ReserveReply)
        size = self._engine.welcome.slot_bytes
        for key, slot in zip(keys[loaded:], reply.slots, strict=True):
            if slot >= 0:
                self._engine.memory[slot * size : slot * size + 32] = key
        self._engine.leader.send(Commit(store=number, seconds=1e-3 * len(reply.slots)))
