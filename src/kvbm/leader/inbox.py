"""The manager's messages to a leader, each to the part of it that asked."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.hints import from_tuples
from kvbm.leader.announced import Announced
from kvbm.leader.lookups import Lookups
from kvbm.leader.offers import Offers
from kvbm.leader.rank_reports import RankReports
from kvbm.leader.stores import Stores
from kvbm.leader.tracked import Tracked
from kvbm.protocol import FromManager, LookupReply, Progress, RankReport, ReserveReply, TierEvents


class Inbox:
    """Takes messages in."""

    def __init__(
        self,
        lookups: Lookups,
        stores: Stores,
        offers: Offers,
        announced: Announced,
        rank_reports: RankReports,
        requests: Mapping[str, Tracked],
    ) -> None:
        self._lookups = lookups
        self._stores = stores
        self._offers = offers
        self._announced = announced
        self._rank_reports = rank_reports
        self._requests = requests

    def take(self, message: FromManager) -> dict[str, float]:
        """One message. Returns the requests whose loads have ended by it, with their seconds."""
        if isinstance(message, LookupReply):
            if (search := self._lookups.replied(message)) is not None:
                self._offers.found(search, message.full)
                if message.verdicts and (tracked := self._requests.get(search.request)) is not None:
                    tracked.heard = from_tuples(message.verdicts)
        elif isinstance(message, Progress):
            self._lookups.progressed(message)
        elif isinstance(message, TierEvents):
            self._announced.take_in(message)
        elif isinstance(message, ReserveReply):
            if (answer := self._stores.replied(message)) is not None:
                self._offers.answered(answer)
        elif isinstance(message, RankReport) and (told := self._rank_reports.add(message)) is not None:
            self._stores.reported(told)
            return told.loaded
        return {}
