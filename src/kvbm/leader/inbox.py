"""The manager's messages to a leader, each to the part of it that asked, and sessions that begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbm.hints import from_tuples
from kvbm.leader.announced import Announced
from kvbm.leader.link import Link
from kvbm.leader.lookups import Lookups
from kvbm.leader.offers import Offers
from kvbm.leader.questions import Questions
from kvbm.leader.rank_reports import RankReports
from kvbm.leader.stores import Stores
from kvbm.leader.tracked import Tracked
from kvbm.protocol import FromManager, LookupReply, Progress, RankReport, ReserveReply, TierEvents


@dataclass(slots=True, eq=False)
class Inbox:
    """Takes messages in. `requests` is the leader's."""

    link: Link
    stores: Stores
    offers: Offers
    lookups: Lookups
    announced: Announced
    questions: Questions
    rank_reports: RankReports
    requests: Mapping[str, Tracked]
    _life: int = 0
    _readied: int = 0

    def receive(self) -> list[tuple[str, float]]:
        """Take in the messages that have arrived. Returns the requests whose loads have ended by them, with their
        seconds."""
        self.lookups.postponed.reads += 1
        ended = [each for message in self.link.poll() for each in self._take(message).items()]
        if self._life != self.link.life:
            self._life = self.link.life
            self.stores.lost()
            self.rank_reports.clear()
            self.offers.anew()
            self.questions.new_session()
        if self._readied != self.link.readied:
            self._readied = self.link.readied
            self.questions.ready_again()
            self.announced.begin()
        return ended

    def _take(self, message: FromManager) -> dict[str, float]:
        """One message. Returns the requests whose loads have ended by it, with their seconds."""
        if isinstance(message, ReserveReply):  # most of them
            if (answer := self.stores.replied(message)) is not None:
                self.offers.answered(answer)
        elif isinstance(message, LookupReply):
            if (search := self.lookups.replied(message)) is not None:
                self.offers.found(search, message.full)
                if message.verdicts and (tracked := self.requests.get(search.request)) is not None:
                    tracked.heard = from_tuples(message.verdicts)
        elif isinstance(message, Progress):
            self.lookups.progressed(message)
        elif isinstance(message, TierEvents):
            self.announced.take_in(message)
        elif isinstance(message, RankReport) and (told := self.rank_reports.add(message)) is not None:
            self.stores.reported(told)
            return told.loaded
        return {}
