"""When each request is looked up: on arrival where the window has room, otherwise when it is its turn, and again when
the first answer no longer holds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from kvbm.block import KEY_BYTES
from kvbm.client.mirror import Mirror
from kvbm.clock import Clock
from kvbm.framing import OUTGOING_BYTES_MAX
from kvbm.leader.keys import RequestKeys
from kvbm.leader.link import Link
from kvbm.leader.lookups import Lookups
from kvbm.leader.patience import ASK_AGAIN_S
from kvbm.leader.search import Search
from kvbm.leader.tracked import Tracked
from kvbm.protocol import KEYS_PER_MESSAGE_MAX

STEP_BLOCKS = 8192
"""A step looks up no more requests that waited for room once the keys of so many blocks went out."""

OPEN_BLOCKS_MAX = OUTGOING_BYTES_MAX // KEY_BYTES // 2
"""Lookups ask for no more blocks at a time, however large the host memory: the session ends if too many bytes wait for
the manager to read them."""


ASKED_AGAIN_MAX = 32
"""So many requests in a step are looked up again because their answers are old; those beyond go by what was found."""

COMPARED_MAX = 64
"""So many requests that have not begun are compared with one whose load could run beside its forward pass."""


class Questions:
    """The leader's lookups in turn. `requests` is the leader's."""

    def __init__(
        self,
        link: Link,
        lookups: Lookups,
        requests: Mapping[str, Tracked],
        keys: RequestKeys,
        clock: Clock,
        mirror: Mirror | None = None,
    ) -> None:
        """By the `mirror` the answer to some lookups is known when they are sent: that nothing is held."""
        self._mirror = mirror
        self._link = link
        self._lookups = lookups
        self._window = lookups.window
        self._requests = requests
        self._keys = keys
        self._clock = clock
        self._again_left, self._refresh_due_s = ASKED_AGAIN_MAX, 0.0

    def arrived(self, request: str, tracked: Tracked, on_device: int) -> None:
        """The request has come; its first `on_device` blocks need not be found."""
        if tracked.extras is not None:
            self._ask_in_turn(request, tracked, on_device)

    def search(self, request: str, tracked: Tracked, computed: int) -> Search | None:
        """The engine asks for what lies behind the request's first `computed` blocks: its lookup, sent now if need be.

        None where it waits for room (`waits`), or where there is nothing to ask for.
        """
        if tracked.extras is None:
            return None
        for displaced in self._window.asked_about(request):
            self._give_up(displaced)
        search = self._lookups.get(request)
        unasked = tracked.asked_from is None or computed < tracked.asked_from
        if search is None and unasked and not tracked.load_failed:
            # Never asked, or the device has dropped blocks since that the question left out.
            search = self._ask_in_turn(request, tracked, computed)
        if search is not None and self._again_left and self._is_stale(search, computed):
            self._again_left -= 1
            search = self._ask(request, tracked, computed, search.attempts + 1)
        return search

    def answer(self, request: str, tracked: Tracked, computed: int) -> tuple[Search | None, int | None]:
        """The same lookup, and how many blocks can be loaded (`Lookups.promised`)."""
        search = self.search(request, tracked, computed)
        if search is None or self._lookups.patience.is_void(search, computed, self._clock()):
            return search, None
        return search, self._lookups.promised(search, computed)

    def waits(self, request: str) -> bool:
        """Whether the request is to be looked up later."""
        return self._window.waits(request)

    def wanted_by_others(self, request: str, block_hash: bytes, place: int) -> bool:
        """Whether another request that has not begun has this block at this place; looks at the oldest few of them."""
        others = ((name, tracked) for name, tracked in self._requests.items() if not tracked.begun)
        return any(
            name != request and place < len(tracked.hashes) and tracked.hashes[place] == block_hash
            for name, tracked in islice(others, COMPARED_MAX)
        )

    def ask_waiting(self) -> None:
        """Look up requests that waited for room, as many as one step has time for."""
        blocks = self._refresh()
        while self._ready() and blocks < STEP_BLOCKS and (request := self._window.next_waiting()) is not None:
            tracked = self._requests.get(request)
            if tracked is None or tracked.begun or self._ask(request, tracked, tracked.on_device) is None:
                self._window.forget(request)
            else:
                blocks += len(tracked.hashes)

    def _refresh(self) -> int:
        """Look requests up again that the engine would run next, where their answers are old: it would ask about all
        that wait, if those in front had to wait for new answers then. How many blocks that asked for."""
        self._again_left = ASKED_AGAIN_MAX
        now_s, blocks = self._clock(), 0
        if not self._window.take_moved() and now_s < self._refresh_due_s:
            return 0
        self._refresh_due_s = now_s + ASK_AGAIN_S
        for request in self._window.next_open(ASKED_AGAIN_MAX):
            tracked, search = self._requests.get(request), self._lookups.get(request)
            if tracked is None or search is None or blocks >= STEP_BLOCKS or not self._ready():
                continue
            if self._is_stale(search, search.skip):
                self._ask(request, tracked, search.skip, max(2, search.attempts))
                blocks += len(tracked.hashes)
        return blocks

    def _is_stale(self, search: Search, computed: int) -> bool:
        return self._lookups.patience.is_stale(search, computed, self._clock())

    def over(self, request: str) -> None:
        """The request is computed without us, or has ended; a load that runs keeps its room until it ends."""
        self._lookups.postponed.forget(request)
        if not self._lookups.loads(request):
            self._window.forget(request)

    def new_session(self) -> None:
        """A session has begun or ended: requests that have not begun are looked up again when the engine asks. Their
        lookups have no leases any more, and keep nobody out."""
        self._lookups.postponed.clear()
        for request, tracked in self._requests.items():
            if not tracked.begun:
                tracked.asked_from = None
                self._window.leave(request)

    def ready_again(self) -> None:
        """All ranks are there again. Requests that have not begun and found nothing are looked up again when the engine
        asks: perhaps it was for want of a rank."""
        self._lookups.postponed.clear()
        for request, tracked in self._requests.items():
            search = self._lookups.get(request)
            if not tracked.begun and (search is None or (search.answered and not search.slots)):
                self._lookups.drop(request)
                tracked.asked_from = None

    def _ready(self) -> bool:
        ready = self._link.ready
        share = ready.lease_blocks if ready is not None else 0
        self._window.capacity = min(share or OPEN_BLOCKS_MAX, OPEN_BLOCKS_MAX)
        return ready is not None

    def _ask_in_turn(self, request: str, tracked: Tracked, skip: int) -> Search | None:
        wanted = tracked.wanted
        blocks = self._lookups.lease_blocks(wanted, skip) if wanted > skip else 0
        if blocks <= 0:
            self._window.forget(request)  # the device has them all by now
        elif self._ready() and self._window.has_room(request, blocks):
            return self._ask(request, tracked, skip)
        else:
            self._window.wait(request, blocks)
            tracked.asked_from, tracked.on_device = None, skip
        return None

    def _give_up(self, request: str) -> None:
        """End a lookup for the sake of a request that the engine would run sooner; it waits for room again."""
        tracked = self._requests.get(request)
        self._lookups.drop(request)
        if tracked is not None:
            tracked.asked_from = None
            self._window.wait(request, self._lookups.lease_blocks(tracked.wanted, 0))

    def _ask(self, request: str, tracked: Tracked, skip: int, attempts: int = 1) -> Search | None:
        if not self._ready():
            return None
        tracked.asked_from = skip
        keys = self._keys(tracked, 0, min(tracked.wanted, KEYS_PER_MESSAGE_MAX)).keys
        search = self._lookups.ask(request, keys, skip, attempts, self._keys.told(tracked), tracked.asker)
        if search is None:
            self._window.forget(request)  # nothing can be asked for: it must not wait for that
        else:
            tracked.asked_blocks = search.wanted
            mirror, first = self._mirror, keys[skip * KEY_BYTES : (skip + 1) * KEY_BYTES]
            if mirror is not None and mirror.complete and not mirror.held((first,)):
                self._lookups.too_late(
                    request
                )  # for the engine; the manager learns what was asked for all the same
        return search
