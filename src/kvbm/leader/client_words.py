"""What the clients of requests say of their future, and what they are told became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbm.hints import ReadHint, Verdict, as_mapping, as_tuples, latest
from kvbm.leader.keys import RequestKeys
from kvbm.leader.link import Link
from kvbm.leader.tracked import Tracked
from kvbm.protocol import KEYS_PER_MESSAGE_MAX, Says


@dataclass(slots=True, eq=False)
class ClientWords:
    """The words about the leader's `requests`. What is known when a request comes goes along with its lookup."""

    link: Link
    keys: RequestKeys
    requests: Mapping[str, Tracked]

    def says(self, request: str, said: ReadHint) -> None:
        """The client says this of a request that was looked up before."""
        tracked = self.requests.get(request)
        if tracked is None or self.link.ready is None or tracked.extras is None or not tracked.hashes:
            return
        keys = self.keys(tracked, 0, min(len(tracked.hashes), KEYS_PER_MESSAGE_MAX)).keys
        hint, verdicts = as_mapping(said.hint), as_tuples(said.verdicts)
        self.link.send(Says(keys=keys, tenant=tracked.asker.tenant, hint=hint, verdicts=verdicts))

    def verdicts(self, request: str) -> tuple[Verdict, ...]:
        """What became of the parts of the request's hint: what the manager said of each, or else its form."""
        tracked = self.requests.get(request)
        return latest(tracked.asker.verdicts, tracked.heard) if tracked is not None else ()
