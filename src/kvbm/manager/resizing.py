"""`kvbm resize`: another size of host memory while the manager serves.

Engines have mapped, and devices have page-locked, the memory that there is, and its size is sealed. So host memory of
the new size is made beside it, the blocks are carried over, and in one turn all namespaces go over: their engines'
sessions end, the engines come again by themselves, as after the manager's end, and map the new memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator

import msgspec

from kvbm.admin_protocol import Resize, Resized, ResizeReport
from kvbm.clock import Clock
from kvbm.errors import KvbmError, SettingsError
from kvbm.manager.administration import refuse_other_roles
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.carrying import Carrying
from kvbm.manager.pins import PINNED_SHARE
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.settings import available_memory_bytes, container_free_bytes, container_limit_bytes
from kvbm.strict import record_swallowed
from kvbm.tiers.host import HostArena, refuse_beyond_memory

log = logging.getLogger("kvbm.manager")

FIELD = "--host"
_NAMED_MAX = 8


def obtainable_bytes() -> int | None:
    """The memory that can still be had, in the machine and in this container; None where nobody knows."""
    known = [each for each in (available_memory_bytes(), container_free_bytes()) if each is not None]
    return min(known, default=None)


class Resizing:
    """The handler of `Resize`. Owned by the manager's thread.

    `send_away(space)` ends the sessions of a space's engines, and names them. `others_busy(session)` tells whether
    another operator's request is half answered. `available_bytes` tells how much memory can still be had, None where
    nobody knows.
    """

    def __init__(
        self,
        spaces: SpaceTable,
        send_away: Callable[[Space], list[str]],
        others_busy: Callable[[Session], bool],
        clock: Clock,
        available_bytes: Callable[[], int | None] = obtainable_bytes,
    ) -> None:
        self._spaces = spaces
        self._send_away = send_away
        self._others_busy = others_busy
        self._clock = clock
        self._busy = False
        self._wanted_bytes, self._started_s = 0, 0.0
        self.under_way: list[Carrying] = []
        """What is being carried over now, by namespace."""
        self.available_bytes = available_bytes

    def report(self) -> ResizeReport | None:
        """How far the resize is that is under way."""
        if not self._busy:
            return None
        return ResizeReport(
            host_bytes=self._wanted_bytes,
            blocks=sum(each.goal for each in self.under_way),
            carried=sum(each.carried for each in self.under_way),
            dropped=sum(each.dropped for each in self.under_way),
            seconds=self._clock() - self._started_s,
        )

    def resize(self, session: Session, message: Resize) -> Iterator[None]:
        """Answer with `Resized`, after many turns."""
        refuse_other_roles(session, message)
        if self._busy:
            session.send(Resized(refusal="another resize is under way"))
            return
        self._busy = True
        self._wanted_bytes, self._started_s = message.host_bytes, self._clock()
        try:
            reply = yield from self._answered(session, message.host_bytes)
        finally:
            self._busy, self.under_way = False, []
        session.send(reply)

    def _answered(self, session: Session, host_bytes: int) -> Generator[None, None, Resized]:
        """The reply, also where it failed. What a refused one has cost all the same is said in it, and logged: the
        operator who asked may have gone."""
        try:
            return (yield from self._resized(session, host_bytes))
        except _CostlyRefusal as error:
            log.warning("resize refused: %s", error)
            return Resized(refusal=str(error), dropped=error.dropped)
        except KvbmError as error:
            return Resized(refusal=str(error))
        except Exception as error:
            record_swallowed(error)
            log.exception("host memory keeps its size")
            return Resized(
                refusal=f"it failed, and host memory keeps its size: {type(error).__name__}: {error}"
            )

    def _resized(self, session: Session, host_bytes: int) -> Generator[None, None, Resized]:
        before_bytes = self._host_bytes()
        self.under_way = carryings = self._begin(host_bytes)
        try:
            for carrying in carryings:
                for _ in carrying.steps():
                    yield
                    _refuse_changed(self._spaces, carryings)
            # A pin that is half found would go on with the memory before.
            while self._others_busy(session):
                yield
            _refuse_changed(self._spaces, carryings)
        except Exception as error:
            dropped, engines = self._undo(carryings)
            if not (dropped or engines):
                raise
            if not isinstance(error, KvbmError):
                record_swallowed(error)
                log.exception("host memory keeps its size")
            raise _CostlyRefusal(error, dropped, engines) from None
        except BaseException:  # the manager ends
            self._undo(carryings)
            raise
        # From here on there is no way back: who comes now gets the new size.
        self._spaces.settings = msgspec.structs.replace(
            self._spaces.settings, host_bytes=host_bytes, host_blocks=None
        )
        pins_ended = 0
        for carrying in carryings:
            self._send_away(carrying.space)
            try:
                pins_ended += carrying.finish(PINNED_SHARE)
            except Exception as error:
                record_swallowed(error)
                log.exception("going over to the new memory")
                carrying.space.failure = f"{type(error).__name__}: {error}"
        failed = [each.space.failure for each in carryings if each.space.failure]
        if failed:
            raise KvbmError(
                f"{len(failed)} of {len(carryings)} namespaces failed while they went over to the new memory, and are "
                f"off until their engines have gone: {failed[0]}"
            )
        carried = sum(each.space.host_pool.counts().resident for each in carryings)
        before = sum(each.before for each in carryings)
        reply = Resized(
            before_bytes=before_bytes,
            # Without a namespace there is no memory yet: it is what the first engine will find.
            after_bytes=self._host_bytes() if carryings else host_bytes,
            blocks_before=before,
            carried=carried,
            dropped=max(0, before - carried),
            pins_ended=pins_ended,
            slots=sum(each.space.host_pool.slot_count for each in carryings),
            seconds=self._clock() - self._started_s,
        )
        log.info(
            "host memory has %.2f GB now, and had %.2f GB: %d of %d blocks were carried over in %.1f s",
            reply.after_bytes / 1e9,
            reply.before_bytes / 1e9,
            carried,
            before,
            reply.seconds,
        )
        return reply

    def _begin(self, host_bytes: int) -> list[Carrying]:
        """Make the new memory of every namespace. Raises SettingsError where it cannot be had; nothing is left then."""
        settings, share = self._spaces.settings, self._spaces.namespaces_max
        value = f"{host_bytes / 1e9:g} GB"
        if not settings.host_on:
            accepted = "a manager with a host tier: host memory is only the way to disk here"
            raise SettingsError(FIELD, value, accepted)
        spaces = [space for _, space in self._spaces]
        needed = 0
        for namespace, space in self._spaces:
            if space.failure:
                raise SettingsError(FIELD, value, f"a manager that works: namespace {namespace.short} is off")
            if space.below.moving_out:
                accepted = "a later moment: reads and writes below still use the memory of the resize before"
                raise SettingsError(FIELD, value, accepted)
            size = space.layout.block_bytes
            if host_bytes // size // share < 1:
                each = f" for each of {share} namespaces" if share > 1 else ""
                raise SettingsError(FIELD, value, f"at least one block of {size} bytes{each}")
            # What a shrink takes out of use is not reckoned with: a device keeps the pages that it has locked, and
            # what is leased stays.
            needed += host_bytes // size // share * size
        refuse_beyond_memory(host_bytes, container_limit_bytes(), FIELD)
        available = self.available_bytes()
        if available is not None and needed > available:
            raise SettingsError(
                FIELD,
                value,
                f"{needed / 1e9:.2f} GB are needed beside the present {self._host_bytes() / 1e9:.2f} GB until all "
                f"engines have gone over, and {available / 1e9:.2f} GB can be had",
            )
        carryings: list[Carrying] = []
        try:
            for space in spaces:
                slots = host_bytes // space.layout.block_bytes // share
                arena = HostArena(
                    space.layout,
                    slots,
                    min(8, os.cpu_count() or 1),
                    field=FIELD,
                    huge_pages=self._spaces.settings.huge_pages,
                )
                try:
                    carryings.append(Carrying(space, arena, self._clock))
                except BaseException:
                    arena.close()
                    raise
                arena.touch_as(space.arena)  # else each copy would pay for its pages, in the manager's thread
        except BaseException:
            self._undo(carryings)
            raise
        return carryings

    def _undo(self, carryings: list[Carrying]) -> tuple[int, list[str]]:
        """Keep the memory that there is. The blocks that are lost nevertheless, and the engines that were sent away."""
        engines: list[str] = []
        for carrying in carryings:
            if carrying.emptied_slots:
                # A device may have locked pages that were given back: its rank has to map and lock them anew.
                engines += self._send_away(carrying.space)
                carrying.space.life += 1
            carrying.undo()
        return sum(carrying.dropped for carrying in carryings), engines

    def _host_bytes(self) -> int:
        """Of all namespaces; of none yet, what the settings say, as far as they say it in bytes."""
        spaces = [space for _, space in self._spaces]
        if not spaces:
            settings = self._spaces.settings
            return 0 if settings.host_blocks else settings.host_bytes or 0
        return sum(space.arena.slot_count * space.layout.block_bytes for space in spaces)


class _CostlyRefusal(KvbmError):
    """A resize that ended after slots had been taken out of use."""

    def __init__(self, error: Exception, dropped: int, engines: list[str]) -> None:
        cost = []
        if dropped:
            cost.append(f"{dropped} blocks had been dropped from it to make room")
        if engines:
            more = f" and {len(engines) - _NAMED_MAX} more" if len(engines) > _NAMED_MAX else ""
            cost.append(f"its engines connect again: {', '.join(map(repr, engines[:_NAMED_MAX]))}{more}")
        text = str(error) if isinstance(error, KvbmError) else f"it failed: {type(error).__name__}: {error}"
        super().__init__(f"{text}; host memory keeps its size, but {', and '.join(cost)}")
        self.dropped = dropped


def _refuse_changed(spaces: SpaceTable, carryings: list[Carrying]) -> None:
    """A namespace that came, went or failed meanwhile ends the resize: its memory was not reckoned with."""
    present = [space for _, space in spaces]
    if present != [carrying.space for carrying in carryings] or any(space.failure for space in present):
        raise KvbmError("a namespace came, went or failed meanwhile; try again")
