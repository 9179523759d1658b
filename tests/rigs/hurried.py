"""A manager whose turns are over at once: every slice of its work is a turn."""

from __future__ import annotations

from typing import Any

from kvbm.clock import ManualClock
from kvbm.hashing import chain_keys, join_keys
from kvbm.manager.requests import RESERVED_AT_ONCE
from kvbm.protocol import FromManager, Lookup
from rigs.manager import LAYOUT, Client, ManagerBench

LONG = chain_keys(
    bytes(31) + b"L", range((4 * RESERVED_AT_ONCE + 100) * LAYOUT.block_tokens), LAYOUT.block_tokens
)


class HurriedClock(ManualClock):
    """While `hurried`, every look at it takes longer than a turn may: no turn has time for a second message."""

    hurried = False

    def __call__(self) -> float:
        if self.hurried:
            self.advance(0.01)
        return super().__call__()


def hurry(manager: ManagerBench) -> None:
    assert isinstance(manager.clock, HurriedClock)
    manager.clock.hurried = True


def arrived(client: Client) -> list[FromManager]:
    """The client's messages by now; the manager does nothing meanwhile."""
    return client.channel.receive()


def lookups(client: Client, count: int, keys: list[Any]) -> None:
    """Many questions in one go, without a turn in between."""
    for number in range(1, count + 1):
        client.channel.send(Lookup(lookup=number, keys=join_keys(keys)))


class Recorder:
    """A policy that says when it learns of requests."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.requests = 0
        self.offered = list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def requested(self, *args: Any) -> None:
        self.requests += 1
        self.inner.requested(*args)

    def evictable(self, slots: Any) -> None:
        self.offered.append(len(slots))
        self.inner.evictable(slots)
