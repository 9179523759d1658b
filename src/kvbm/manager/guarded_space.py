"""A space whose failure ends it alone: neither the manager nor the cache of another namespace goes with it.

An assertion that fails, or an exception of an installed policy, says that the index may be wrong. From then on the
space answers nothing: it finds no block, gives no slot and takes none back. Its memory stays as it is, because workers
may still copy out of it and into it, until its last engine has gone; the next engine of the namespace gets a new space.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Generator, Sequence
from typing import Any, ParamSpec, TypeVar

from kvbm.block import BlockKey
from kvbm.errors import KvbmError, SpaceFailed
from kvbm.hints import UNHINTED, ClientHint
from kvbm.manager.foresight import Decided
from kvbm.manager.leases import Lease, Owner, Reservation
from kvbm.manager.lookups import Found, LookingUp
from kvbm.manager.retaining import Judging
from kvbm.manager.space import Space
from kvbm.slices import advance
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.manager")

P = ParamSpec("P")
T = TypeVar("T")


class GuardedSpace(Space):
    """A `Space` that turns an unexpected exception of its own into `failure`, one line, logged once."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        """`name` is the namespace's short name, for the log; the others are `Space`'s.

        Raises a KvbmError, also where an installed policy raises something else.
        """
        try:
            super().__init__(*args, **kwargs)
        except KvbmError:
            raise
        except Exception as error:
            record_swallowed(error)
            log.debug("namespace %s cannot be opened", name, exc_info=error)
            raise SpaceFailed(f"namespace {name} cannot be opened: {_in_one_line(error)}") from error
        self._name = name

    def looking_up(
        self, owner: Owner, number: int, keys: Sequence[BlockKey], skip: int, asker: ClientHint = UNHINTED
    ) -> LookingUp:
        return (yield from self._in_turns(Found(), super().looking_up(owner, number, keys, skip, asker)))

    def heard(
        self, asker: ClientHint, keys: Sequence[BlockKey], reached: int, again: bool = False
    ) -> Generator[None, None, Decided]:
        return (yield from self._in_turns((), super().heard(asker, keys, reached, again)))

    def judged(self, keys: Sequence[BlockKey], asker: ClientHint) -> Judging:
        return (yield from self._in_turns((), super().judged(keys, asker)))

    def release(self, owner: Owner, number: int) -> Lease | None:
        return self._try(None, super().release, owner, number)

    def shorten(self, owner: Owner, number: int, blocks: int) -> None:
        self._try(None, super().shorten, owner, number, blocks)

    def reserve(
        self,
        owner: Owner,
        number: int,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        hashes: bytes = b"",
        group: int | bytes = 0,
        more: bool = False,
        tenant: str = "",
    ) -> list[int]:
        refused = self.refuse(keys)
        return self._try(refused, super().reserve, owner, number, parent, keys, hashes, group, more, tenant)

    def committing(self, owner: Owner, number: int, failed: Sequence[int] = ()) -> Generator[None, None, int]:
        return (yield from self._in_turns(0, super().committing(owner, number, failed)))

    def abort(self, reservation: Reservation) -> None:
        self._try(None, super().abort, reservation)

    def release_later(self, leases: Sequence[Lease]) -> None:
        self._try(None, super().release_later, leases)

    def abort_later(self, reservations: Sequence[Reservation]) -> None:
        self._try(None, super().abort_later, reservations)

    def finished(self, key: BlockKey, output_tokens: int) -> None:
        self._try(None, super().finished, key, output_tokens)

    def move(self, until_s: float) -> bool:
        return self._try(False, super().move, until_s)

    def catch_up(self) -> bool:
        return self._try(False, super().catch_up)

    def expire_leases(self) -> list[Lease]:
        return self._try(list[Lease](), super().expire_leases)

    def overdue(self) -> list[Reservation]:
        return self._try(list[Reservation](), super().overdue)

    def clear(self, tier: str = "") -> tuple[int, int]:
        return self._try((0, 0), super().clear, tier)

    def begin_clear(self, tier: str = "") -> tuple[int, int]:
        return self._try((0, 0), super().begin_clear, tier)

    def tiers(self) -> dict[str, int]:
        return {} if self.failure else super().tiers()

    def describe(self) -> dict[str, object]:
        described = super().describe()
        return {**described, "fault": self.failure} if self.failure else described

    def stop(self) -> None:
        self._try(None, super().stop)

    def _in_turns(self, otherwise: T, work: Generator[None, None, T]) -> Generator[None, None, T]:
        def step() -> T | None:
            return advance(work)

        while (result := self._try(otherwise, step)) is None:
            yield
        return result

    def _try(self, otherwise: T, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.failure:
            try:
                return method(*args, **kwargs)
            except Exception as error:  # a `KvbmError` too: what a client got wrong was refused before
                record_swallowed(error)
                self._fail(error)
        return otherwise

    def _fail(self, error: Exception) -> None:
        self.failure = _in_one_line(error)
        # One line; the traceback is for those who ask for it.
        log.error(
            "namespace %s is off, and its engines run without a KV cache until all of them have gone: %s",
            self._name,
            self.failure,
        )
        log.debug("namespace %s is off", self._name, exc_info=error)
        for lease in list(self.leases):
            if not lease.final:  # no more blocks will become ready: say so to those that wait
                del lease.slots[lease.ready :], lease.keys[lease.ready :], lease.sources[lease.ready :]
                self.on_progress(lease)


def _in_one_line(error: Exception) -> str:
    what = " ".join(f"{type(error).__name__}: {error}".split())
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)  # reads no source files
    return f"{what} ({os.path.basename(frame.f_code.co_filename)}:{line})"
