"""What the tiers of all namespaces hold, published for routers: one stream for all engines of the manager.

The messages of a namespace have its short name as their topic. What there is to tell waits as marks of slots
(`slot_facts`), so that slow subscribers cost no memory here. Who subscribes late is told of everything that is held:
it is published once more, which changes nothing for those who know it.

Subscribers are told to forget a topic, and everything anew, only where marks cannot say what has gone: when a namespace
has failed or ended; and in the first seconds of a namespace, because a subscriber that was there
before the manager may know what an earlier one held.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, cast

from kvbm.clock import Clock, monotonic
from kvbm.errors import SettingsError
from kvbm.layout import Namespace
from kvbm.manager.announcements import next_events, told_tiers
from kvbm.manager.slot_facts import SlotFacts, TierListener
from kvbm.manager.space import Space
from kvbm.protocol import TierEvents
from kvbm.settings import Settings

log = logging.getLogger("kvbm.manager")

TOLD_APART_S = 1.0
"""Subscribers that come within this time of one another are told of everything together."""
FIRST_S = 10.0
"""Who comes back after a manager's restart has done so by then: a lost connection is tried again ten times a second."""


class Publisher(Protocol):
    """Where messages go (see `events.publisher`)."""

    endpoint: str
    replay_endpoint: str

    @property
    def room(self) -> bool:
        """Whether a message can be taken now. After False, the descriptor says when that may be so again."""

    def publish(self, topic: bytes, told: TierEvents, cleared: bool = False) -> None:
        """Take a message; `cleared`: subscribers are to forget the topic before."""

    def fileno(self) -> int:
        """Readable when there is something to take, or room again."""

    def take_subscribed(self) -> list[bytes]:
        """The topics that somebody has subscribed to since the last call."""


@contextlib.contextmanager
def publishing(settings: Settings, private: bool) -> Iterator[Publisher | None]:
    """The publisher that the settings ask for, until the end; None without one.

    Raises SettingsError where it cannot listen. A private manager does without rather than not to start: engines beside
    one another mostly name the same address.
    """
    if settings.events_endpoint is None:
        yield None
        return
    # Imported late: who publishes nothing needs no ZMQ.
    events = importlib.import_module("kvbm.events.publisher")
    try:
        publisher = events.EventPublisher(
            settings.events_endpoint, settings.events_replay_endpoint, monotonic, time.time
        )
    except SettingsError as error:
        if not private:
            raise
        log.warning("no KV events are published: %s", error)
        yield None
        return
    with contextlib.closing(publisher):
        publisher.start()
        yield cast(Publisher, publisher)


@dataclass
class _Topic:
    """One namespace. `cleared`: the next message begins with that."""

    name: bytes
    since_s: float
    tiers: list[SlotFacts] = field(default_factory=list)
    listeners: list[TierListener] = field(default_factory=list)
    cleared: bool = False

    def begin(self, tiers: list[SlotFacts]) -> None:
        """Tell of these tiers, from the start."""
        self.end()
        self.tiers, self.listeners, self.cleared = tiers, [facts.listen() for facts in tiers], True

    def end(self) -> None:
        """Listen to nothing any more."""
        for listener in self.listeners:
            listener.facts.ignore(listener)
        self.listeners = []


class EventStream:
    """Tells the publisher what the spaces hold. Owned by the manager's thread."""

    def __init__(
        self, publisher: Publisher, spaces: Callable[[], Iterable[tuple[Namespace, Space]]], clock: Clock
    ) -> None:
        self._publisher = publisher
        self._spaces = spaces
        self._clock = clock
        self._topics: dict[Space, _Topic] = {}
        self._ended: list[bytes] = []
        self._subscribed: set[bytes] = set()
        self._told_all_at_s = clock() - TOLD_APART_S

    def woken(self) -> None:
        """The publisher's descriptor is readable."""
        self._subscribed.update(self._publisher.take_subscribed())

    def tell(self) -> bool:
        """Hand over what there is to tell; whether something is left that the publisher could take now."""
        self._follow()
        self._greet()
        left = False
        while self._ended and self._publisher.room:
            self._publisher.publish(self._ended.pop(), TierEvents(), cleared=True)
        for topic in self._topics.values():
            if not self._publisher.room:
                return False  # it wakes us
            left = self._tell(topic) or left
        return left

    def _follow(self) -> None:
        """Namespaces come, go and fail."""
        present = dict[Space, Namespace]((space, namespace) for namespace, space in self._spaces())
        for space in [each for each in self._topics if each not in present]:
            topic = self._topics.pop(space)
            topic.end()
            self._ended.append(topic.name)
        for space, namespace in present.items():
            if space not in self._topics:
                self._topics[space] = _Topic(namespace.short.encode(), self._clock())
                self._topics[space].begin(told_tiers(space))
            topic, tiers = self._topics[space], told_tiers(space)
            if list(map(id, topic.tiers)) != list(map(id, tiers)):
                topic.begin(tiers)

    def _greet(self) -> None:
        """Tell those who have subscribed of everything."""
        now_s = self._clock()
        if not self._subscribed or now_s - self._told_all_at_s < TOLD_APART_S:
            return
        self._told_all_at_s = now_s
        for topic in self._topics.values():
            if not any(topic.name.startswith(each) for each in self._subscribed):
                continue
            if now_s - topic.since_s < FIRST_S:
                topic.begin(topic.tiers)
            else:
                for listener in topic.listeners:
                    listener.again()
        self._subscribed.clear()

    def _tell(self, topic: _Topic) -> bool:
        if topic.cleared or not all(listener.complete for listener in topic.listeners):
            removed, stored = next_events(topic.listeners)
            if removed or stored or topic.cleared:
                self._publisher.publish(topic.name, TierEvents(removed=removed, stored=stored), topic.cleared)
                topic.cleared = False
        return not all(listener.idle for listener in topic.listeners)
