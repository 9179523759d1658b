"""One pool's pages at the manager: what is held, loads and stores. Owned by the keeper's thread.

SGLang asks first which pages of a chain are held, and reads them later, in batches, or never. What an answer named
stays leased until it was read, a later answer needs the room, or some time has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
from blake3 import blake3

from kvbm.block import BlockKey
from kvbm.client.mirror import Mirror
from kvbm.clock import Clock
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, ManagerUntrusted
from kvbm.hashing import EngineKeys, space_mask
from kvbm.layout import Namespace
from kvbm.library import BlockManager
from kvbm.library.backend import Stored
from kvbm.library.hit import Hit
from kvbm.sglang_integration.host_pages import Pages
from kvbm.sglang_integration.page_keys import PARENTS_MAX, Parents, block_keys

log = logging.getLogger("kvbm.sglang")

PROMPT_BYTES = 16
HITS_MAX = 64
"""Answers whose pages stay leased at one time."""
HIT_S = 10.0
"""How long an answer's pages stay leased without being read."""
ARRIVAL_S = 5.0
"""How long a read waits for pages that come from disk. SGLang gives its threads 10 s to end."""
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
SHAPES_S = 5.0
"""How long a store waits until it is known what computes the pages."""
ROOM_S = 0.2
"""How long a store waits for room: blocks on their way to disk leave some. Half as long after each wait in vain."""
STORED_AT_ONCE = 32
"""Pages that are copied before others get a turn."""


class Counts(msgspec.Struct):
    """Pages since whoever reads them cleared it: found and asked for, loaded and stored, and the bytes and seconds."""

    asked: int = 0
    found: int = 0
    loaded: int = 0
    load_s: float = 0.0
    stored: int = 0
    store_s: float = 0.0


@dataclass(eq=False)
class _OpenHit:
    """An answer that named these pages: `places` has each one's position in the hit."""

    hit: Hit
    places: dict[BlockKey, int]
    until_s: float
    held: ExitStack = field(default_factory=ExitStack)
    read: int = 0
    readers: int = 0
    """Loads that are reading it: it stays leased until they have ended."""

    def named(self, keys: Sequence[BlockKey]) -> int:
        """How many of the keys, from the first on, follow one another in the hit: another chain may begin alike."""
        first = self.places.get(keys[0])
        if first is None:
            return 0
        together = enumerate(keys, first)
        return next((place - first for place, key in together if self.places.get(key) != place), len(keys))


class PagesKept:
    """See the module. `join` makes the block manager; it is tried again, with pauses, while it raises, and never longer
    at a time than `join` itself waits. `shapes()` gives what selects the key space; None while that is not known,
    and `coming()` says whether it will be soon. `known()` is the same for any thread, without asking anybody.
    `join` keeps the `mirror` up to date. Of a
    `chained` pool a page is of use only where all before it are kept too.
    """

    def __init__(
        self,
        namespace: Namespace,
        pages: Pages,
        join: Callable[[], BlockManager],
        shapes: Callable[[], bytes | None],
        known: Callable[[], bytes | None],
        coming: Callable[[], bool],
        clock: Clock,
        mirror: Mirror,
        chained: bool = True,
    ) -> None:
        self._fingerprint = namespace.fingerprint
        self.pages, self.mirror = pages, mirror
        self.counts = Counts()
        self._join, self._clock = join, clock
        self._shapes, self._known, self._coming = shapes, known, coming
        self._manager: BlockManager | None = None
        self._parents = Parents(PARENTS_MAX if chained else 0)
        self._hits: list[_OpenHit] = []
        self._retry_at_s, self._retry_s = clock(), RETRY_S_MIN
        self._trouble = ""
        self._patience_s = ROOM_S

    def held(self, hashes: Sequence[str], prefix: Sequence[str] = ()) -> int:
        """How many of these pages are held in a row, from the first on. They stay leased for a while."""
        opened = self._open(hashes, prefix)
        self.counts.asked += len(hashes)
        if opened is None:
            return 0
        self.counts.found += opened.hit.blocks
        self._hits.append(opened)
        if len(self._hits) > HITS_MAX:
            self._drop(self._hits[0])
        return opened.hit.blocks

    def each_held(self, hashes: Sequence[str]) -> list[bool]:
        """Which of these pages are held, each by itself, as far as the mirror knows. Nothing is leased.

        For pages of windows, which are looked for at every page of a prompt.
        """
        mask = self._mask()
        if self._present() is None or mask is None:
            return [False] * len(hashes)
        return self.mirror.each_held(block_keys(hashes, mask))

    def load(
        self,
        hashes: Sequence[str],
        numbers: Sequence[int],
        taken: Callable[[Sequence[int]], None] | None = None,
    ) -> Generator[None, None, list[bool]]:
        """Bring these pages into the pool's pages `numbers`; which ones arrived. Waits for those that come from disk.

        `taken(rows)` is called for the pages of each part that has arrived, instead of the pool's own `taken`.
        """
        begun_s, done, mask = self._clock(), 0, self._mask()
        hit, first, named = self._hit_of(hashes, mask)
        if hit is not None:
            hit.readers += 1
        try:
            while hit is not None and done < named:
                wanted = min(named - done, self.pages.batch)
                ready = yield from self._await(hit.hit, first + wanted)
                if self._mask() != mask:
                    break  # the engine computes with other weights by now
                part = numbers[done : done + min(wanted, max(0, ready - first))]
                copied = hit.hit.onboard(self.pages.cache, self.pages.take(part), first) if part else 0
                if copied:
                    (taken or self.pages.taken)(part[:copied])
                done, first, hit.read = done + copied, first + copied, hit.read + copied
                hit.until_s = self._clock() + HIT_S
                if copied < wanted:
                    break
        finally:
            if hit is not None:
                hit.readers -= 1
                self._read(hit)
        self.counts.loaded += done
        self.counts.load_s += self._clock() - begun_s
        return [True] * done + [False] * (len(hashes) - done)

    def store(
        self,
        hashes: Sequence[str],
        numbers: Sequence[int],
        prefix: Sequence[str] = (),
        fill: Callable[[int, int], None] | None = None,
        valid: Callable[[], bool] = lambda: True,
    ) -> Generator[None, None, list[bool]]:
        """Keep the pool's pages `numbers`, which follow one another; which ones are kept now. SGLang offers them once.

        `fill(row, position)` puts the page at a position into a row of the buffer, if they do not come from the pool.
        Nothing more is copied once the pages are no longer `valid`: others may lie there, or other weights compute.
        """
        until_s = self._clock() + SHAPES_S
        while self._mask() is None and self._coming() and valid() and self._clock() < until_s:
            yield  # SGLang offers pages once: those of its first requests too, while weights are digested
        manager, mask = self._present(), self._mask()
        if manager is None or mask is None:
            return [False] * len(hashes)
        begun_s, keys = self._clock(), block_keys(hashes, mask)
        before = block_keys(prefix[-1:], mask)
        self._parents.chain(keys, before[0] if before else None)
        step, done, patient_until_s = min(STORED_AT_ONCE, self.pages.batch), 0, 0.0
        while done < len(keys):
            # What the rest was computed with may not be what it would be kept under.
            if self._mask() != mask or not valid():
                break
            part, rows = keys[done : done + step], numbers[done : done + step]
            if fill is not None:
                for row in range(len(part)):
                    fill(row, done + row)
                blocks = list(range(len(part)))
            else:
                blocks = self.pages.put(rows)
            run = EngineKeys(part, self._parents.of(part[0]))
            outcomes = manager.offload_each(run, self.pages.cache, blocks)
            kept = outcomes.index(Stored.REFUSED) if Stored.REFUSED in outcomes else len(outcomes)
            self.counts.stored += outcomes.count(Stored.COPIED)
            done += kept
            if kept:
                patient_until_s, self._patience_s = 0.0, ROOM_S
            elif not patient_until_s and manager.descriptors():
                patient_until_s, self._patience_s = self._clock() + self._patience_s, self._patience_s / 2
            elif self._clock() >= patient_until_s:
                break  # a page behind one that is not kept could never be found
            if done < len(keys):
                yield
        self.counts.store_s += self._clock() - begun_s
        return [True] * done + [False] * (len(hashes) - done)

    def clear(self) -> int:
        """Drop all pages that nobody uses; how many. 0 without a manager."""
        self._drop_all()
        manager = self._present()
        try:
            return manager.clear() if manager is not None else 0
        except ManagerUnavailable as error:
            log.warning("pages were not cleared: %s", error)
            return 0

    def open(self, hashes: Sequence[str], request: str = "") -> tuple[Hit, ExitStack] | None:
        """A hit of these pages, held until the stack is closed; None where not even the first is held."""
        opened = self._open(hashes, request=request)
        return (opened.hit, opened.held) if opened is not None else None

    def manager(self) -> BlockManager | None:
        """The block manager, where there is one by now."""
        return self._manager

    def keys(self, hashes: Sequence[str]) -> list[BlockKey] | None:
        """The keys of these pages; None while it is not known what computes them. For any thread."""
        known = self._known()
        return block_keys(hashes, space_mask(self._fingerprint, known)) if known is not None else None

    def descriptors(self) -> tuple[int, ...]:
        """What can be read when the manager has said something."""
        return self._manager.descriptors() if self._manager is not None else ()

    def tick(self) -> None:
        """Take in what the manager has said, and give back what nobody read in time."""
        self._shapes()
        if self._manager is not None:
            self._manager.refresh()
        now_s = self._clock()
        for hit in [each for each in self._hits if each.until_s <= now_s and not each.readers]:
            self._drop(hit)

    def join(self) -> None:
        """Join the manager now. Raises KvbmError where that fails."""
        if self._manager is None:
            self._manager = self._join()

    def close(self) -> None:
        """Give everything back and leave the manager."""
        self._drop_all()
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.close()

    # ---- inside

    def _open(self, hashes: Sequence[str], prefix: Sequence[str] = (), request: str = "") -> _OpenHit | None:
        """A hit of these pages from the first on; None where not even that one is held."""
        manager, mask = self._present(), self._mask()
        if manager is None or mask is None or not hashes:
            return None
        keys = block_keys(hashes, mask)
        before = block_keys(prefix, mask)
        self._parents.chain(keys, before[-1] if before else None)
        first = blake3((*prefix, *hashes)[0].encode()).digest(PROMPT_BYTES)
        run = EngineKeys(before + keys, request=request, prompt=first, extras=(("weights", mask[:4].hex()),))
        held = ExitStack()
        hit = held.enter_context(manager.match(run, skip=len(before)))
        if not hit.blocks:
            held.close()
            return None
        places = {key: place for place, key in enumerate(keys[: hit.blocks])}
        return _OpenHit(hit, places, self._clock() + HIT_S, held)

    def _hit_of(self, hashes: Sequence[str], mask: bytes | None) -> tuple[_OpenHit | None, int, int]:
        """A hit that names the first of these pages, its place there, and how many of them it names in a row. A new
        one, for this alone, where none that is leased names them all."""
        keys = block_keys(hashes, mask) if mask is not None else []
        if not keys:
            return None, 0, 0
        best = max(reversed(self._hits), key=lambda hit: hit.named(keys), default=None)
        named = best.named(keys) if best is not None else 0
        if best is not None and named == len(keys):
            return best, best.places[keys[0]], named
        opened = self._open(hashes)
        if opened is not None and (best is None or opened.hit.blocks > named):
            return opened, 0, opened.hit.blocks
        if opened is not None:
            opened.held.close()
        return (best, best.places[keys[0]], named) if best is not None and named else (None, 0, 0)

    def _read(self, hit: _OpenHit) -> None:
        """A load of this hit has ended: give it back, if it was opened for that alone or dropped meanwhile, or has been
        read to its end."""
        if not hit.readers and (hit not in self._hits or hit.read >= hit.hit.blocks):
            self._drop(hit)

    def _await(self, hit: Hit, blocks: int) -> Generator[None, None, int]:
        """Wait until so many blocks have arrived, no more will, or it takes too long; how many have."""
        until_s = self._clock() + ARRIVAL_S
        while True:
            ready, more = hit.ready()
            if ready >= blocks or not more or self._clock() >= until_s:
                return ready
            yield

    def _mask(self) -> bytes | None:
        shapes = self._shapes()
        return space_mask(self._fingerprint, shapes) if shapes is not None else None

    def _present(self) -> BlockManager | None:
        if self._manager is None and self._clock() >= self._retry_at_s:
            try:
                self._manager = self._join()
                self._retry_s = RETRY_S_MIN
            except (ManagerUnavailable, ManagerRefused, ManagerUntrusted, KvbmError, OSError) as error:
                self._retry_at_s = self._clock() + self._retry_s
                self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    log.warning("no KV cache for now: %s", error)
        return self._manager

    def _drop(self, hit: _OpenHit) -> None:
        if hit in self._hits:
            self._hits.remove(hit)
        if not hit.readers:
            hit.held.close()

    def _drop_all(self) -> None:
        for hit in list(self._hits):
            self._drop(hit)
