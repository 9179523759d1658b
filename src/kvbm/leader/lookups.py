"""From a new request to its load: ask which blocks the manager holds (it leases them), promise them, load them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count

from kvbm.block import KEY_BYTES, Tier, counted_as_disk
from kvbm.clock import Clock
from kvbm.grouping import Grouping
from kvbm.hints import UNHINTED, ClientHint
from kvbm.leader.cost import CostModel
from kvbm.leader.link import Link
from kvbm.leader.patience import Patience
from kvbm.leader.postponed import Postponed
from kvbm.leader.rising import Rising
from kvbm.leader.search import Search, Stage
from kvbm.leader.traces import RequestTraces
from kvbm.leader.tracked import NOTHING_TOLD, Told
from kvbm.leader.unloaded import Unloaded
from kvbm.leader.window import Window
from kvbm.observe import moves_log
from kvbm.protocol import LookupReply, Progress, Release
from kvbm.step_plan import LoadPlan

_LATE_MAX = 256


class Lookups:
    """All lookups of one engine. `promise_early`: blocks that are still being read from disk may be promised, because
    the engine recomputes those that do not arrive; otherwise only verified blocks in host memory are. `grouping` is the
    order of a hybrid model's blocks. `at_once`: what is not there when the engine asks comes for the next time."""

    def __init__(
        self,
        link: Link,
        cost: CostModel,
        clock: Clock,
        promise_early: bool,
        first_number: int,
        grouping: Grouping | None = None,
        at_once: bool = False,
    ) -> None:
        self.window = Window()
        self.postponed = Postponed(clock, self.window)
        self._at_once, self._rising = at_once, Rising(link, at_once)
        self._grouping = grouping
        self._link = link
        self._cost = cost
        self._clock = clock
        self._promise_early = promise_early
        self._numbers = count(first_number)
        self._by_request: dict[str, Search] = {}
        self._by_number: dict[int, Search] = {}
        # Given up before their answers came, each with the number of leading blocks on the device by then.
        self._late: dict[int, tuple[Search, int]] = {}
        self.traces: RequestTraces | None = None
        self.patience = Patience(link, cost)
        self._unloaded = Unloaded(link)
        self.unloaded = self._unloaded.by_reason
        """Blocks that the device lacked, that were found, and that were computed all the same, by reason."""
        self.loaded_blocks = {Tier.HOST: 0, Tier.DISK: 0, Tier.REMOTE: 0}
        self.failed_blocks = 0
        """Blocks that reached the device, by tier, and those that were promised and did not."""

    def __len__(self) -> int:
        return len(self._by_request)

    def ask(
        self,
        request: str,
        keys: bytes,
        skip: int,
        attempts: int = 1,
        told: Told = NOTHING_TOLD,
        asker: ClientHint = UNHINTED,
    ) -> Search | None:
        """Send a lookup for the blocks after the first `skip` of `keys`, which are joined; None without such blocks, or
        without a manager. In place of an earlier lookup it keeps that one's place in the window."""
        wanted = len(keys) // KEY_BYTES
        if self._link.ready is None or skip >= wanted:
            self.drop(request)
            return None
        self._release(request)
        number, epoch = next(self._numbers), self._link.ready.epoch
        search = Search(request, number, self._link.life, skip, self._clock(), attempts=attempts, epoch=epoch)
        search.wanted = wanted
        if not self._link.send(search.question(keys, told, asker)):
            self.window.leave(request)
            return None
        self._by_request[request] = search
        self._by_number[search.number] = search
        self.window.enter(request, self.lease_blocks(wanted, skip))
        self.postponed.wake(request)
        return search

    def lease_blocks(self, wanted: int, skip: int) -> int:
        """The most blocks that the lease of a lookup holds that asks for the prompt's first `wanted` blocks."""
        if self._grouping is None:
            return wanted - skip
        return self._grouping.run_length_max(self._grouping.floor(wanted), skip)

    def replied(self, reply: LookupReply) -> Search | None:
        """The manager's answer, and its lookup. The lease of a lookup that was dropped before was released then."""
        self.patience.record_answer()
        late = self._late.pop(reply.lookup, None)
        search = late[0] if late is not None else self._by_number.get(reply.lookup)
        if search is None:
            return None
        search.replied(reply, self._clock())
        self.postponed.wake(search.request)
        if late is None:
            self.window.found(search.request, len(search.slots))
        else:
            self._unloaded.note(search, late[1], 0)
            # The slowest answers are those that came too late: their times count too.
            self._link.send(Release(lookup=search.number, answer_s=search.answer_s, unloaded=search.unloaded))
        return search

    def progressed(self, progress: Progress) -> None:
        """Blocks arrived in host memory, or will not come."""
        if progress.final:
            self._rising.ended(progress.lookup)
        search = self._by_number.get(progress.lookup)
        if search is not None:
            self.postponed.wake(search.request)
            search.ready = max(search.ready, progress.ready)
            search.final = progress.final
            if progress.final:
                # The two clocks are one on a node; a manager that says otherwise is not believed.
                now_s = self._clock()
                answered_s = search.asked_s + search.answer_s
                search.final_s = min(max(progress.at_s, answered_s), now_s) if progress.at_s else now_s

    def get(self, request: str) -> Search | None:
        """The request's lookup, if it is of this life of the session."""
        search = self._by_request.get(request)
        if search is not None and search.life != self._link.life and search.stage is not Stage.LOADING:
            self._unloaded.note(search, search.skip, 0)
            self._forget(search)
            return None
        return search

    @property
    def unanswered(self) -> bool:
        """Whether the manager has yet to answer a lookup, or to bring its blocks to host memory."""
        return any(
            search.stage is Stage.ASKED or (search.stage is Stage.FOUND and not search.final)
            for search in self._by_request.values()
        )

    @property
    def loading(self) -> int:
        """How many loads run."""
        return len(self.loading_requests)

    @property
    def loading_requests(self) -> list[str]:
        """The requests whose loads run."""
        return [name for name, search in self._by_request.items() if search.stage is Stage.LOADING]

    def promised(self, search: Search, computed: int) -> int | None:
        """How many blocks after the first `computed` can be loaded; None means ask again later.

        The only side effect: a lookup that took too long, or that is not worth loading, is over.
        """
        now_s = self._clock()
        if search.stage is Stage.ASKED:
            if not self.patience.unanswered_too_long(search, now_s):
                return None
            search.stage, search.why = Stage.OVER, "deadline"
            self.patience.record_unanswered()
        if search.stage is not Stage.FOUND:
            return 0
        search.missing, search.why = 0, ""
        if computed < search.skip or (search.boundary and computed != search.skip):
            search.why = "stale"
            return 0
        if self.patience.is_aged(search, now_s):
            search.stage, search.why = Stage.OVER, "stale"  # its lease may have ended
            return 0
        held = len(search.slots) if self._promise_early and not search.final else search.ready
        offset = computed - search.skip
        sources = search.sources[offset:held]
        if (
            not (self._promise_early or self._at_once)
            and not search.final
            and now_s - search.asked_s < self.patience.for_reads_s(search, offset)
        ):
            return None
        missing = max(0, len(search.slots) - max(held, offset))
        search.missing = search.blocks if search.boundary and missing else missing
        search.why_missing = "refused" if search.final else "deadline"
        usable = max(0, held - offset)
        if not usable or (search.boundary and usable < len(search.slots)):
            return 0
        arrival_s = 0.0 if search.ready - offset >= usable else max(0.0, search.arrives_s - now_s)
        if search.boundary:
            usable = search.blocks
            worth = usable * self._cost.worth_loading_all(sources, computed, usable, arrival_s)
        else:
            worth = self._cost.worth_loading(sources[:usable], computed, arrival_s)
        if worth < usable:
            search.why = "cost"
        if not worth:
            search.stage = Stage.OVER
        return worth

    def asked(self, request: str) -> bool:
        """Whether the manager has yet to answer the request's lookup."""
        return (search := self._by_request.get(request)) is not None and search.stage is Stage.ASKED

    def too_late(self, request: str) -> None:
        """The engine waits no longer for the answer to this request's lookup."""
        if self.asked(request):
            self._by_request[request].stage, self._by_request[request].why = Stage.OVER, "deadline"

    def sources(self, request: str, computed: int, blocks: int) -> bytes:
        """The tiers that so many promised blocks of the request come from, one byte each."""
        search = self.get(request)
        if search is None:
            return b""
        first = computed - search.skip
        return self.counted_sources(search.prompt_sources()[first : first + blocks])

    def counted_sources(self, sources: bytes) -> bytes:
        """The tiers as metrics count them: blocks that pass through a staging area come from disk."""
        return counted_as_disk(sources) if self._link.staging else sources

    def all_ready(self, search: Search, computed: int, count: int) -> bool:
        """Whether `count` blocks after the computed ones lie in host memory by now."""
        return search.ready >= computed - search.skip + count

    def begin_load(
        self,
        request: str,
        computed: int,
        count: int,
        table: Sequence[int],
        layerwise: bool = False,
        tables: Sequence[Sequence[int]] = (),
    ) -> LoadPlan:
        """The load of `count` promised blocks after the first `computed`, for the next plan: the engine made room.
        With several groups each has its own of `tables`.

        The manager may have died since the promise. The plan names the epoch of the promise: workers that still map
        that memory load from it, others report failed blocks, and in both cases the engine's request goes on.
        """
        search = self._by_request.get(request)
        if search is None or search.stage is not Stage.FOUND:
            search = Search(request, next(self._numbers), -1, 0, self._clock())
            search.slots = search.generations = (0,) * self.lease_blocks(computed + count, computed)
            search.skip = computed
            search.boundary = computed + count if self._grouping is not None else 0
            self._by_request[request] = search
        self.window.begin(request)
        offset = computed - search.skip
        end = offset + count
        device_blocks = tuple(table[computed : computed + count])
        if self._grouping is not None:
            device_blocks, end = self._blocks_of_run(search, computed, tables), len(search.slots)
        search.plan = LoadPlan(
            request=request,
            lookup=search.number,
            epoch=search.epoch,
            slots=search.slots[offset:end],
            generations=search.generations[offset:end],
            device_blocks=device_blocks,
            offset=offset,
            ready=max(0, min(search.ready - offset, len(device_blocks))),
            layerwise=layerwise,
            traced=self.traces is not None,
            nodes=self._link.nodes_of_lookup(search.number, offset, end),
        )
        search.begun_s = self._clock()
        search.used = search.sources[offset:end]
        if search.epoch >= 0:
            self._unloaded.note(search, computed, count)
        search.stage = Stage.LOADING
        moves_log.onboarding(count, "host", "device", request)
        return search.plan

    def _blocks_of_run(
        self, search: Search, computed: int, tables: Sequence[Sequence[int]]
    ) -> tuple[int, ...]:
        """Where the engine wants the blocks of all groups up to a boundary."""
        assert self._grouping is not None
        blocks = tuple(self._grouping.run_in(tables, search.boundary, computed))
        assert all(blocks), f"the engine made no room for a block that boundary {search.boundary} needs"
        assert len(blocks) == len(search.slots)
        return blocks

    def loads(self, request: str) -> bool:
        """Whether the request's load runs."""
        search = self._by_request.get(request)
        return search is not None and search.stage is Stage.LOADING

    def holds_loaded(self, request: str) -> bool:
        """Whether the manager of now holds what the request is loading."""
        return (search := self._by_request.get(request)) is not None and search.life == self._link.life

    def loads_by_layer(self, request: str) -> bool:
        """Whether the request's load runs beside the forward pass that reads it."""
        search = self._by_request.get(request)
        return search is not None and search.plan is not None and search.plan.layerwise

    def note_failures(self, invalid: set[int]) -> bool:
        """A rank reported failed device blocks: each of their loads counts as arrived only up to its first failed one.

        Ranks report at different times; a load has ended when the last rank reported it. True when a forward pass has
        read such blocks.
        """
        read = False
        for search in self._by_request.values():
            if search.stage is Stage.LOADING and search.plan is not None:
                blocks = search.plan.device_blocks
                first = next((i for i, block in enumerate(blocks) if block in invalid), None)
                if first is not None:
                    search.arrived = first if search.arrived is None else min(first, search.arrived)
                    read = read or search.plan.layerwise
        return read

    def note_failed(self, requests: Collection[str]) -> None:
        """Of these requests' loads, which are of use as a whole only, a rank lacks a part."""
        for request in requests:
            search = self._by_request.get(request)
            if search is not None and search.stage is Stage.LOADING:
                search.arrived = 0

    def note_copies(self, copied: Mapping[str, tuple[int, int]]) -> None:
        """Ranks report when they copied; of a load it counts from the first to the last."""
        for request, (began, ended) in copied.items():
            search = self._by_request.get(request)
            if search is not None:
                first, last = search.copied or (began, ended)
                search.copied = min(first, began), max(last, ended)

    def end_load(self, request: str, seconds: float) -> tuple[bytes, int]:
        """A load ended on all ranks: the tiers of the blocks that arrived, and how many did not."""
        search = self._by_request.get(request)
        if search is None or search.plan is None:
            return b"", 0
        planned = len(search.plan.device_blocks)
        failed = 0 if search.arrived is None else planned - search.arrived
        arrived = search.used[: planned - failed]
        self._cost.loaded(arrived, seconds)
        lost = failed if not search.boundary else search.blocks * bool(failed)
        self._unloaded.count(search, self._unloaded.why_failed(search), lost)
        came = search.prompt_sources() if search.boundary and not failed else arrived
        if search.life == self._link.life:
            first = search.plan.offset
            done = Release(
                lookup=search.number,
                first=first,
                loaded=len(arrived),
                failed=failed,
                seconds=seconds,
                answer_s=search.answer_s,
                wait_s=self._clock() - search.asked_s,
                unloaded=search.unloaded,
                prefill_s=self._cost.prefill_s(len(came), search.skip + first) or 0.0,
            )
            self._rising.release(search, done)
        self._forget(search)
        counted = self.counted_sources(came)
        for tier in self.loaded_blocks:
            self.loaded_blocks[tier] += counted.count(tier)
        self.failed_blocks += lost
        return counted, lost

    def decline(self, request: str, computed: int) -> None:
        """The engine loads nothing and computes all blocks after the first `computed`: count those, and drop."""
        search = self._by_request.get(request)
        if search is None or search.stage is Stage.LOADING:
            return
        if search.answered:
            self._unloaded.note(search, computed, 0)
        elif search.stage is Stage.OVER:
            self._late[search.number] = search, computed
            while len(self._late) > _LATE_MAX:
                del self._late[next(iter(self._late))]
        self.drop(request)

    def drop(self, request: str) -> None:
        """The request needs its lookup no more. A running load keeps its lease until it ends.

        The lease is released at once, even before the answer has come: with no request left the engine may take no
        further step in which to do it.
        """
        if self._release(request):
            self.window.leave(request)

    def _release(self, request: str) -> bool:
        """The lookup has ended, if there is one whose load does not run; true then."""
        search = self._by_request.get(request)
        if search is None or search.stage is Stage.LOADING:
            return False
        if search.life == self._link.life:
            # Also where nothing was found: how long the answer took counts all the same.
            over = Release(lookup=search.number, answer_s=search.answer_s, unloaded=search.unloaded)
            self._rising.release(search, over)
        self._remove(search)
        return True

    def _forget(self, search: Search) -> None:
        if self._by_request.get(search.request) is search:
            self.window.leave(search.request)
        self._remove(search)

    def _remove(self, search: Search) -> None:
        if self.traces is not None:
            self.traces.looked_up(search)
        self._by_number.pop(search.number, None)
        self.postponed.wake(search.request)
        if self._by_request.get(search.request) is search:
            del self._by_request[search.request]
