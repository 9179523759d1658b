"""The keys of a request's blocks, for the weights and the manager of now."""

from __future__ import annotations

from kvbm.block import BlockKey
from kvbm.leader.link import ManagerLink
from kvbm.leader.salt import KeySalt
from kvbm.leader.tracked import Tracked


class RequestKeys:
    """Makes keys once, and anew when the namespace or the salt has changed."""

    def __init__(self, link: ManagerLink, salt: KeySalt) -> None:
        self._link = link
        self._salt = salt

    def __call__(self, tracked: Tracked, count: int) -> list[BlockKey]:
        """The keys of the first `count` blocks, as far as the engine has hashed them. There is a manager."""
        ready = self._link.ready
        assert ready is not None
        salt = self._salt.value
        namespace = ready.fingerprint + salt
        if tracked.keyed_for != namespace:
            tracked.keys, tracked.keyed_for = [], namespace
        tracked.extend_keys(count, ready.fingerprint, tracked.extras + salt)
        return tracked.keys[:count]
