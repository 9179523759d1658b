"""An operator's question why a prompt misses, asked without a request: what is held of it now, and why no more."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from operator import or_
from typing import Any

from kvbm.admin_protocol import FindPrefix, PrefixFound, WhyPrompt
from kvbm.block import BlockKey, Tier
from kvbm.grouping import Grouping, Reach, sources_of_prompt
from kvbm.manager.administration import refuse_other_roles
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.history import Held, History
from kvbm.manager.pins import checked_keys, space_of
from kvbm.manager.session import Session
from kvbm.manager.space import Space

FOUND_AT_ONCE = 4096


class PromptQuestions:
    """Handlers of the questions about a prompt's blocks, which lease nothing. Owned by the manager's thread."""

    def __init__(self, spaces: SpaceTable, history: History) -> None:
        self._spaces = spaces
        self._history = history

    @property
    def handlers(self) -> dict[type, Callable[[Session, Any], Iterator[None] | None]]:
        """What answers each message."""
        return {FindPrefix: self.find_prefix, WhyPrompt: self.why}

    def find_prefix(self, session: Session, message: FindPrefix) -> Iterator[None]:
        """Count a chain's leading blocks that are held."""
        refuse_other_roles(session, message)
        keys, space = checked_keys(message.keys), space_of(self._spaces, message.fingerprint)
        held = (yield from count_held(space, keys)) if space is not None else Held()
        session.send(PrefixFound(blocks=held.blocks, host=held.host_prefix))

    def why(self, session: Session, message: WhyPrompt) -> Iterator[None]:
        """Answer with the history's word on the first block that is in no tier."""
        refuse_other_roles(session, message)
        keys, space = checked_keys(message.keys), space_of(self._spaces, message.fingerprint)
        if space is None or not keys:
            session.send(self._history.no_answer())
            return
        held = yield from count_held(space, keys)
        session.send(self._history.explained(message.prompt, keys, space, held))


def count_held(space: Space, keys: list[BlockKey]) -> Generator[None, None, Held]:
    """Of a chain's leading blocks, how many are held in each tier; a long chain is looked through in several turns.

    As lookups count them: what passes through a staging area is the disk's.
    """
    if space.layout.groups:
        return (yield from _count_groups(space, Grouping(space.layout.groups), keys))
    blocks = host = remote = host_prefix = disk_prefix = remote_prefix = 0
    for start in range(0, len(keys), FOUND_AT_ONCE):
        if start:
            yield
        part = keys[start : start + FOUND_AT_ONCE]
        on_host = [slot is not None for slot in space.host_pool.find_all(part)]
        below = space.disk.pool_if_on if space.disk is not None else None
        found = below.find_all(part) if below is not None else [None] * len(part)
        on_disk = [slot is not None for slot in found]
        if space.options.staging:
            on_disk = [passes or under for passes, under in zip(on_host, on_disk, strict=True)]
            on_host = [False] * len(part)
        near = [above or under for above, under in zip(on_host, on_disk, strict=True)]
        away = space.below.away(part)
        run = _leading([here or bool(there) for here, there in zip(near, away, strict=True)])
        blocks += run
        host += sum(on_host[:run])
        remote += near[:run].count(False)
        host_prefix += _leading(on_host) if host_prefix == start else 0
        disk_prefix += _leading(on_disk) if disk_prefix == start else 0
        remote_prefix += _leading(list(map(bool, away))) if remote_prefix == start else 0
        if run < len(part):
            break
    return Held(blocks, host, host_prefix, disk_prefix, remote=remote, remote_prefix=remote_prefix)


def _count_groups(space: Space, grouping: Grouping, keys: list[BlockKey]) -> Generator[None, None, Held]:
    """The same for a model with several groups: a prompt is held up to the last boundary where it can be taken up."""
    host, disk = space.host_pool, space.disk.pool_if_on if space.disk is not None else None

    def on_host(wanted: list[BlockKey]) -> bytes:
        return bytes(slot is not None for slot in host.find_all(wanted))

    def on_disk(wanted: list[BlockKey]) -> bytes:
        there = (
            bytes(slot is not None for slot in disk.find_all(wanted))
            if disk is not None
            else bytes(len(wanted))
        )
        return bytes(map(or_, there, on_host(wanted))) if space.options.staging else there

    def anywhere(wanted: list[BlockKey]) -> bytes:
        return bytes(map(or_, map(or_, on_host(wanted), on_disk(wanted)), away(wanted)))

    away = space.below.away
    found, chain = yield from grouping.searching(keys, anywhere)
    in_host, in_disk = Reach(0, 0), Reach(0, 0)
    if not space.options.staging:
        in_host, _ = yield from grouping.searching(keys, on_host)
    if disk is not None:
        in_disk, _ = yield from grouping.searching(keys, on_disk)
    in_store = Reach(0, 0)
    if space.remotes:
        in_store, _ = yield from grouping.searching(keys, away)
    needed = chain[: grouping.chain_length(found.boundary)]
    needed += grouping.keys(keys, grouping.tail(found.boundary))
    above = bytes(len(needed)) if space.options.staging else on_host(needed)
    where = bytes(
        Tier.HOST if here else Tier.DISK if under else Tier.REMOTE
        for here, under in zip(above, on_disk(needed), strict=True)
    )
    sources = sources_of_prompt(where, found.boundary)
    return Held(
        found.boundary,
        sources.count(Tier.HOST),
        in_host.boundary,
        in_disk.boundary,
        found.full,
        sources.count(Tier.REMOTE),
        in_store.boundary,
    )


def _leading(flags: list[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)
