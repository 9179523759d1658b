"""The leader as an engine integration drives it: one call per moment of a request's life, all from one thread.

No call waits for the manager beyond the budget below, and only an idle engine step waits at all. With no manager,
a dead one or a slow one, every answer is "nothing found, nothing to store".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvbm.client.finder import Finder
from kvbm.client.mirror import Mirror
from kvbm.clock import Clock
from kvbm.grouping import Grouping
from kvbm.groups import Group
from kvbm.hints import UNHINTED, ClientHint
from kvbm.leader.announced import Announced
from kvbm.leader.client_words import ClientWords
from kvbm.leader.cost import CostModel
from kvbm.leader.device import DeviceBlocks
from kvbm.leader.group_offers import GroupOffers
from kvbm.leader.inbox import Inbox
from kvbm.leader.joint_loads import JointLoads
from kvbm.leader.keys import RequestKeys
from kvbm.leader.link import Link, ManagerLink
from kvbm.leader.lookups import Lookups
from kvbm.leader.nodes import NodesLink
from kvbm.leader.offers import Offers
from kvbm.leader.questions import Questions
from kvbm.leader.rank_reports import RankReports
from kvbm.leader.renewal import Renewal
from kvbm.leader.step_budget import IDLE_WAIT_S, LAST_STORES_WAIT_S, StepBudget
from kvbm.leader.step_times import StepTimes
from kvbm.leader.stores import Stores
from kvbm.leader.traces import RequestTraces
from kvbm.leader.tracked import ASK_AGAIN, NOTHING_TOLD, Answer, Keep, Says, Scheduled, Told, Tracked
from kvbm.leader.unconfirmed import Unconfirmed
from kvbm.leader.weights_known import WeightsKnown
from kvbm.observe.spans import SpanSink
from kvbm.protocol import Finished, Hello
from kvbm.step_plan import LoadPlan, StepPlan, StepReport


class Leader:
    """Decides which blocks one engine loads and stores.

    `hashes` of a request is the engine's own list of block hashes; it may grow as tokens come in. `promise_early`
    is True for an engine that recomputes blocks which do not arrive. `layerwise`: loads may run beside the forward
    pass that reads them; it needs `device`. `weights_version` names the weights that the engine starts with, where
    their files do not. `spans` takes what became of each request. `groups` are a hybrid model's. `zeroes`: the
    engine zeroes blocks when it hands them out. `at_once`: it asks once (`first_contact`), copies stores after the
    step's forward pass, and its ranks report through the manager; by a `mirror` certain misses are known. `nodes`
    find the managers of the engine's other nodes.
    `requests`, `lookups` and `stores` are empty once no request is left and the ranks and the manager have answered.
    """

    def __init__(
        self,
        finder: Finder,
        hello: Hello,
        block_tokens: int,
        promise_early: bool,
        clock: Clock,
        load_always: bool = False,
        layerwise: bool = False,
        device: DeviceBlocks | None = None,
        weights_version: str = "",
        spans: SpanSink | None = None,
        groups: Sequence[Group] = (),
        zeroes: bool = False,
        announces: bool = False,
        at_once: bool = False,
        mirror: Mirror | None = None,
        nodes: Sequence[Finder] = (),
    ) -> None:
        assert mirror is None or not nodes
        assert device is not None or not (layerwise or zeroes)
        assert not ((groups or zeroes) and layerwise), "so for one group only"
        self._grouping = grouping = Grouping(groups) if groups else None
        self._step = grouping.step if grouping is not None else 1
        self._clock = clock
        self._link: Link = ManagerLink(finder, hello, clock, mirror)
        if nodes:
            self._link = NodesLink((finder, *nodes), hello, clock, lambda: self.lookups.loading > 0)
        self.cost = CostModel(block_tokens, load_always)
        # A worker that outlived an earlier leader must not take this one's numbers for that one's.
        first = int.from_bytes(os.urandom(6), "little") << 8
        self.lookups = Lookups(self._link, self.cost, clock, promise_early, first, grouping, at_once)
        self.traces = RequestTraces(spans, self._link, clock, block_tokens) if spans is not None else None
        self.lookups.traces = self.traces
        self.stores = Stores(self._link, clock, hello.rank_count, first, device, zeroes)
        self._layerwise, self._at_once, self._device = layerwise, at_once, device
        self._unconfirmed, self.joint_loads = Unconfirmed(), JointLoads(on=not at_once)
        self.requests: dict[str, Tracked] = {}
        self._weights = WeightsKnown(weights_version)
        self._keys = RequestKeys(self._link, self._weights.salt)
        self.client_words = ClientWords(self._link, self._keys, self.requests)
        self._questions = Questions(self._link, self.lookups, self.requests, self._keys, clock, mirror)
        offering = self.stores, self.requests, self._keys, clock, block_tokens
        self._offers = Offers(*offering) if grouping is None else GroupOffers(*offering, grouping)
        self.announced = Announced(self._link, clock, announces)
        self.rank_reports = RankReports(hello.rank_count)
        parts = self.stores, self._offers, self.lookups, self.announced
        self._renewal = Renewal(self._link, self._weights, *parts, self.requests)
        self._inbox = Inbox(self._link, *parts, self._questions, self.rank_reports, self.requests)
        self._reads_due = True  # messages are taken in once a step: an engine may ask about thousands
        self._new_loads: list[LoadPlan] = []
        self._budget, self._steps = StepBudget(self._link), StepTimes(self.cost, clock)
        self.receive()

    @property
    def ready(self) -> bool:
        """Whether the manager and all ranks are there."""
        return self._link.ready is not None

    @property
    def tiers(self) -> dict[str, int]:
        """The number of blocks of each tier that is on; empty without a manager."""
        return dict(self._link.ready.tiers) if self._link.ready is not None else {}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in a tier; 0 without a manager."""
        return self._link.ready.block_bytes if self._link.ready is not None else 0

    # ---- a request comes

    def request_added(
        self,
        request: str,
        hashes: Sequence[bytes],
        extras: bytes | None,
        on_device: int,
        keep: Keep | None = None,
        told: Told = NOTHING_TOLD,
        trace_headers: Mapping[str, str] | None = None,
        before_tail: int = 0,
        says: Says | None = None,
        asker: ClientHint = UNHINTED,
    ) -> None:
        """Ask at once which blocks the manager holds. The first `on_device` are in the device's prefix cache now.

        Without `extras` nothing is asked or stored before `extras_known`. `keep` is asked before blocks are committed,
        and `told` goes along for people. `trace_headers` name the trace that it belongs to. `before_tail` is as in
        `matched`, and counts with several groups. `says` is asked what may be announced of blocks that are stored.
        `asker` is the client, and what it says of the request's future.
        """
        if self._reads_due:
            self.receive()
        if self.traces is not None:
            self.traces.arrived(request, trace_headers)
        tracked = Tracked(hashes, extras, keep, told, says, asker)
        if self._grouping is not None:
            tracked.ends_before(before_tail, self._grouping.step)
        self.requests[request] = tracked
        self.lookups.postponed.answered(request, on_device)
        self._questions.arrived(request, tracked, on_device)

    def extras_known(self, request: str, extras: bytes) -> None:
        """What was missing in the keys of a request that came without extras."""
        tracked = self.requests.get(request)
        if tracked is not None and tracked.extras is None:
            tracked.extras = extras

    def is_postponed(self, request: str, computed: int) -> bool:
        """Whether `matched` told the engine to ask again, and nothing has happened since that can change this."""
        if self._reads_due:
            self.receive()
        return self._link.ready is not None and self.lookups.postponed.holds(request, computed)

    def matched(self, request: str, computed: int, before_tail: int = 0) -> Answer:
        """How many blocks after the first `computed` can be loaded. May be asked many times; no answer is final.

        Behind the first `before_tail` blocks lie tokens of the request that must be computed in any case.
        """
        if self.is_postponed(request, computed):
            return ASK_AGAIN
        tracked, postponed = self.requests.get(request), self.lookups.postponed
        if postponed.asks_twice(request):
            self.receive()
        if tracked is None:
            return Answer()
        postponed.answered(request, computed)
        tracked.computed = computed
        if self._grouping is not None:
            tracked.ends_before(before_tail, self._grouping.step)
        tracked.outdated = self._weights.device_mixed and computed > 0  # it depends on what it finds there
        if self._unconfirmed.shared(tracked.hashes, computed):
            return ASK_AGAIN  # even without a manager: the ranks confirm them
        # A part of a block is the engine's to copy, and what is found was not computed from outdated blocks.
        if not self.ready or computed >= tracked.wanted or computed % self._step or tracked.outdated:
            return Answer()
        if load := self.joint_loads.awaited(request, tracked.hashes, computed, self._clock()):
            postponed.answered(request, computed, load)
            return ASK_AGAIN
        search, promised = self._questions.answer(request, tracked, computed)
        if search is not None and promised is None and self._budget.left_s > 0.0:
            self._wait_a_little(self._budget.left_s)
            # The answer may have come, and be to a question that left out blocks which the device has dropped since.
            search, promised = self._questions.answer(request, tracked, computed)
        if search is None and not self._questions.waits(request):
            return Answer()
        if search is None or promised is None:
            postponed.answered(request, computed, self.lookups.patience.until(search, computed))
            return ASK_AGAIN
        tracked.layerwise = (
            self._layerwise
            and 0 < promised <= before_tail - computed
            and self.lookups.all_ready(search, computed, promised)
            # Others that want the same blocks may read them only when the load is confirmed: one load, then one step.
            and not self._questions.wanted_by_others(request, tracked.hashes[computed], computed)
        )
        return Answer(blocks=promised, layerwise=tracked.layerwise)

    def promised_sources(self, request: str, blocks: int) -> bytes:
        """The tiers that `blocks` promised blocks come from, one byte each."""
        tracked = self.requests.get(request)
        return self.lookups.sources(request, tracked.computed, blocks) if tracked else b""

    def allocated(
        self, request: str, count: int, table: Sequence[int], tables: Sequence[Sequence[int]] = ()
    ) -> None:
        """The engine made room: load `count` promised blocks; with 0, the request is computed without us.

        `table` is the request's whole block table, with several groups `tables` has each one's; the loaded blocks
        follow those that were computed already.
        """
        tracked = self.requests.get(request)
        if count <= 0:
            self.lookups.decline(request, tracked.computed if tracked is not None else 0)
            self._questions.over(request)
            if self.traces is not None:
                self.traces.over(request)
            return
        computed, layerwise = (tracked.computed, tracked.layerwise) if tracked is not None else (0, False)
        self._new_loads.append(self.lookups.begin_load(request, computed, count, table, layerwise, tables))
        if tracked is None:
            return
        tracked.begun = True
        if layerwise:
            self._unconfirmed.add(request, computed, tracked.hashes[computed])
        else:
            blocks = tracked.hashes[computed : computed + count]
            self.joint_loads.begun(
                request, blocks, self._clock(), self.cost.prefill_s_at_most(count, computed)
            )

    # ---- a step

    def step(
        self,
        scheduled: Iterable[Scheduled],
        preempted: Collection[str],
        prefill_tokens: int,
        idle: bool,
        prefill_position: float = 0.0,
    ) -> StepPlan:
        """The plan of an engine step that computes `prefill_tokens` prompt tokens, whose mean position is
        `prefill_position`; an `idle` step computes nothing."""
        left_s = self._budget.begin()
        self.receive()
        for request in preempted:
            self.stores.ended(request)
            tracked = self.requests.get(request)
            if tracked is not None:
                tracked.preempted(self.lookups.loads(request))
        scheduled = list(scheduled)
        self._renewal.mark_outdated(scheduled)
        if self._at_once:
            # The plan's copies come after this step's forward pass, so it may have the blocks that the step completes.
            with self._link.in_one_write():
                self._offers.scheduled(scheduled, self.ready)
            if prefill_tokens and self.stores.unanswered:
                self._wait_a_little(left_s, lambda: self.stores.unanswered)
                self._budget.begin()
        waits = self.stores.last_chance or (idle and self.stores.unanswered)
        if waits:
            self._wait_a_little(LAST_STORES_WAIT_S if idle else left_s, lambda: self.stores.unanswered)
            self._budget.begin()
        stores, released = self.stores.plan(), self.stores.released()
        with self._link.in_one_write():
            if not self._at_once:
                self._offers.scheduled(scheduled, self.ready)
            self._questions.ask_waiting()
        loads, self._new_loads = tuple(self._new_loads), []
        if idle and not (waits or loads or stores) and self.lookups.unanswered and not self.lookups.loading:
            self._wait_a_little(IDLE_WAIT_S, lambda: self.lookups.unanswered)
        self._reads_due = True
        if not idle:
            self._steps.scheduled(prefill_tokens, prefill_position)
        return StepPlan(
            stores=stores, loads=loads, idle=idle, released=released, weights=self._weights.changes
        )

    def updated(
        self,
        report: StepReport | None,
        arrived: Iterable[str],
        invalid: set[int],
        failed: Collection[str] = (),
    ) -> None:
        """Ranks report: `arrived` requests are loaded; `invalid` blocks, or the loads of `failed` requests, are not."""
        self._steps.ended()
        self.receive()
        self._reads_due = True
        if report is not None:
            self.lookups.note_copies(report.copied)
            if report.weights_changed:
                self.weights_changed()  # first: these stores may have copied KV of other weights
            with self._link.in_one_write():
                self.stores.reported(report)
        if invalid and self.lookups.note_failures(invalid):
            assert self._device is not None
            self.stores.doubt()
            self._offers.anew()
            # The engine recomputes these blocks in place, and would share them with other requests before that.
            self._device.forget_all()
        self.lookups.note_failed(failed)
        loaded = report.loaded if report is not None else {}
        # The engine reports no end of these loads: every rank ends them within its step.
        by_layer = [request for request in loaded if self.lookups.loads_by_layer(request)]
        for request in loaded:
            self._unconfirmed.confirmed(request)
        with self._link.in_one_write():
            for request in (*arrived, *by_layer):
                self.joint_loads.ended(request)
                self._end_load(request, loaded.get(request, 0.0))

    def finished(
        self,
        request: str,
        output_tokens: int = 0,
        tables: Sequence[Sequence[int]] = (),
        complete_blocks: int = 0,
        in_step: bool = False,
    ) -> None:
        """The request ended, or was aborted; its device blocks are free after this step. With several groups these are
        their tables, and so many leading blocks are complete. `in_step`: others may end in the same step, and `flush`
        comes at its end."""
        with self._link.in_one_write(later=in_step):
            self.lookups.drop(request)
            self._questions.over(request)
            self._end_trace(request, "aborted")
            tracked = self.requests.pop(request, None)
            if tracked is None:
                return
            if self.ready:
                self._offers.ending(request, tracked, tables, complete_blocks)
            self.stores.ended(request, held=True)
            last = tracked.asked_blocks
            if last and self.ready and (key := self._keys(tracked, last - 1, last).keys):
                self._link.send(Finished(key=key, output_tokens=output_tokens))

    def flush(self) -> None:
        """The engine's step is over, and it may take no other one: send what was left for later."""
        with self._link.in_one_write():
            pass

    def reset(self, keep_disk: bool = False, device_emptied: bool = True) -> bool:
        """Forget all blocks (see `Renewal.reset`). False only while a load writes into blocks."""
        self._renewal.reset(keep_disk, device_emptied)
        return not self.lookups.loading

    def weights_changed(self) -> None:
        """The ranks compute with other weights: no block of before is found or stored any more."""
        self._renewal.weights_changed()

    def weights_named(self, version: str) -> None:
        """The trainer names the ranks' weights: engines of the same files and version share their blocks."""
        self._renewal.weights_named(version)

    def device_was_reset(self, weights_may_change: bool) -> None:
        """The engine emptied its device's cache (see `WeightsKnown`)."""
        self._renewal.device_was_reset(weights_may_change)

    def unkeep(self, request: str) -> None:
        """Load and store nothing more for this request."""
        self.lookups.drop(request)
        self._questions.over(request)
        self._end_trace(request, "computed")
        self.requests.pop(request, None)

    def close(self) -> None:
        self._link.close()

    # ---- inside

    def receive(self) -> None:
        """Take in the manager's messages."""
        self._reads_due = False
        for request, seconds in self._inbox.receive():
            self._end_load(request, seconds)

    def may_wait(self, request: str) -> bool:
        """Whether the answer to the request's lookup may still come within the step's budget."""
        return self.ready and self._budget.left_s > 0.0 and self.lookups.asked(request)

    def _wait_a_little(self, seconds: float, awaited: Callable[[], object] = bool) -> None:
        if self.lookups.patience.is_manager_silent:
            self.receive()
        else:
            self._budget.wait(seconds, self.receive, awaited)

    def _end_load(self, request: str, seconds: float) -> None:
        held = self.lookups.holds_loaded(request)
        arrived, failed = self.lookups.end_load(request, seconds)
        tracked = self.requests.get(request)
        if tracked is not None:
            tracked.load_failed = failed > 0
            if held and not failed:
                self._offers.loaded(tracked, len(arrived))
        if self.traces is not None:
            self.traces.over(request, last=tracked is None)

    def _end_trace(self, request: str, outcome: str) -> None:
        """The request has gone; one whose load runs is traced to the load's end."""
        if self.traces is not None and not self.lookups.loads(request):
            self.traces.over(request, outcome, last=True)
