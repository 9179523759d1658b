"""Stores, lookups, pins and resets between the pieces of a resize, against a dict: what is found has its bytes."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm.admin_protocol import Pin, Pinned, Resize, Resized, decode_from_manager
from kvbm.clock import ManualClock
from kvbm.errors import ManagerUnavailable
from kvbm.hashing import chain_keys, join_keys
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    Hello,
    Lookup,
    LookupReply,
    Message,
    Ready,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    Welcome,
)
from kvbm.testing.oracle import block_bytes
from rigs.manager import LAYOUT, NAMESPACE, Client, ManagerBench
from rigs.property_tests import scale_examples

CHAINS = [chain_keys(bytes(32), range(100 * n, 100 * n + 32), LAYOUT.block_tokens) for n in range(5)]
chains, lengths = st.integers(0, len(CHAINS) - 1), st.integers(1, 8)


class PassingClock(ManualClock):
    """A turn of the manager takes one message, or one piece."""

    def __call__(self) -> float:
        self.advance(0.0015)
        return super().__call__()


class ResizingMachine(RuleBasedStateMachine):
    """One engine, one operator. `stored` has the version of each block that was stored last."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.manager = ManagerBench(Path(self.directory.name), clock=PassingClock(50.0), host_blocks=20)
        self.numbers = iter(range(1, 10**6))
        self.stored: dict[bytes, set[int]] = {}
        self.sessions: list[Client] = []
        self.admin = self.operator()
        self.resizer = self.operator()
        self.wanted = 0
        self.connect()

    def operator(self) -> Client:
        admin = self.manager.client()
        admin.channel._decode = decode_from_manager
        admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
        admin.expect(Welcome)
        return admin

    def connect(self) -> None:
        self.worker = self.manager.worker()
        self.leader = self.manager.leader()
        assert self.leader.expect(Ready).ready

    def away(self) -> bool:
        """Whether our sessions were ended; then we connect again."""
        self.leader._receive()
        if self.leader.gone:
            for client in (self.leader, self.worker):
                client.close()
            self.manager.step()
            self.connect()
            return True
        self.leader.inbox.clear()
        return False

    def ask(self, message: Message, kind: type[Any]) -> Any:
        """The leader's answer; None when its session ends instead."""
        leader = self.leader
        try:
            leader.channel.send(message)
        except ManagerUnavailable:
            return None
        while True:
            self.manager.until(leader._receive)
            while leader.inbox:
                if isinstance(answer := leader.inbox.pop(0), kind):
                    return answer
            if leader.gone:
                return None

    @rule(chain=chains, length=lengths)
    def store(self, chain: int, length: int) -> None:
        if self.away():
            return
        keys, number = CHAINS[chain][:length], next(self.numbers)
        reply = self.ask(Reserve(store=number, parent=b"", keys=join_keys(keys)), ReserveReply)
        if reply is None:
            return
        for key, slot in zip(keys, reply.slots, strict=True):
            if slot >= 0:
                self.worker.write(slot, key, nonce=number)
                self.stored.setdefault(key, set()).add(number)
        with contextlib.suppress(ManagerUnavailable):
            self.leader.send(Commit(store=number))

    @rule(chain=chains, length=lengths)
    def load(self, chain: int, length: int) -> None:
        if self.away():
            return
        keys, number = CHAINS[chain][:length], next(self.numbers)
        found = self.ask(Lookup(lookup=number, keys=join_keys(keys)), LookupReply)
        if found is None:
            return
        assert found.ready == len(found.slots)
        size = self.worker.welcome.slot_bytes
        for key, slot in zip(keys, found.slots, strict=False):
            versions = self.stored.get(key, set())
            assert self.worker.read(slot) in [block_bytes(key, nonce, size) for nonce in versions]
        with contextlib.suppress(ManagerUnavailable):
            self.leader.send(Release(lookup=number))

    @rule(chain=chains, length=lengths, seconds=st.sampled_from([0.0, 600.0]))
    def pin(self, chain: int, length: int, seconds: float) -> None:
        keys = join_keys(CHAINS[chain][:length])
        self.admin.send(Pin(fingerprint=NAMESPACE.fingerprint.hex(), keys=keys, seconds=seconds))
        self.admin.expect(Pinned)

    @rule()
    def reset(self) -> None:
        self.admin.send(Reset())
        self.admin.expect(ResetReply)

    @precondition(lambda self: not self.wanted)
    @rule(blocks=st.integers(1, 40))
    def begin_resize(self, blocks: int) -> None:
        self.wanted = blocks
        self.resizer.channel.send(Resize(host_bytes=blocks * LAYOUT.block_bytes))

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        self.manager.step(turns)

    @precondition(lambda self: self.wanted)
    @rule()
    def end_resize(self) -> None:
        reply = self.resizer.expect(Resized)
        assert not reply.refusal
        assert reply.slots == self.wanted == self.manager.space().arena.slot_count
        self.wanted = 0

    @invariant()
    def law(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()

    def teardown(self) -> None:
        self.manager.check()
        self.manager.close()
        self.directory.cleanup()


TestResizing = ResizingMachine.TestCase
TestResizing.settings = settings(max_examples=scale_examples(60), stateful_step_count=40, deadline=None)
