"""The keys of a request's blocks, for the weights and the manager of now."""

from __future__ import annotations

from kvbm.leader.link import Link
from kvbm.leader.salt import KeySalt
from kvbm.leader.tracked import Named, Told, Tracked


class RequestKeys:
    """Names blocks by their keys. Keeps none: other weights or another manager give the same blocks other keys."""

    def __init__(self, link: Link, salt: KeySalt) -> None:
        self._link = link
        self._salt = salt

    def __call__(self, tracked: Tracked, start: int, end: int) -> Named:
        """The blocks from number `start` up to `end`, as far as the engine has hashed them. There is a manager, and the
        request's extras are known."""
        ready = self._link.ready
        assert ready is not None
        assert tracked.extras is not None
        return tracked.named(start, end, ready.fingerprint, self._salt.beside(tracked.extras))

    def told(self, tracked: Tracked) -> Told:
        """What people are told of the request's keys, the weights' part included."""
        told, weights = tracked.told, self._salt.value
        return told._replace(extras=(*told.extras, ("weights", weights.hex()[:8]))) if weights else told
