"""Sessions that get a message for every request: hashes, lengths and times, which `kvbm record` writes to a file."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.block import BlockKey
from kvbm.clock import Clock
from kvbm.layout import Namespace
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.protocol import Asked, Ended, Message


class Followers:
    """The sessions that follow. One that reads more slowly than requests come is closed; requests never wait."""

    def __init__(
        self,
        clock: Clock,
        session_by_number: Callable[[int], Session | None],
        namespace_of: Callable[[Space], Namespace],
    ) -> None:
        self._clock = clock
        self._session_by_number = session_by_number
        self._namespace_of = namespace_of
        self._numbers: set[int] = set()

    def add(self, session: Session) -> None:
        """The session gets a message for every request from now on."""
        self._numbers.add(session.number)

    def asked(self, space: Space, keys: bytes) -> None:
        """A request was looked up; `keys` is its chain, joined."""
        if self._numbers:
            namespace, tokens = self._namespace_of(space), space.layout.block_tokens
            fingerprint, model = namespace.fingerprint, namespace.model
            self._send(
                Asked(
                    fingerprint=fingerprint, model=model, block_tokens=tokens, keys=keys, at_s=self._clock()
                )
            )

    def ended(self, space: Space, key: BlockKey, output_tokens: int) -> None:
        """The request whose prompt ended with this key has ended."""
        if self._numbers:
            fingerprint, now_s = self._namespace_of(space).fingerprint, self._clock()
            self._send(Ended(fingerprint=fingerprint, key=key, output_tokens=output_tokens, at_s=now_s))

    def _send(self, message: Message) -> None:
        for number in list(self._numbers):
            session = self._session_by_number(number)
            if session is None:
                self._numbers.discard(number)
            else:
                session.send(message)
