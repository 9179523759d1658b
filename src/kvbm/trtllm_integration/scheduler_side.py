"""The scheduler's half of the connector: turns TensorRT-LLM's calls into calls of `Leader`.

The match is the first that we hear of a request, and must be answered at once. Only blocks that lie verified in host
memory are promised, leased until they are loaded: this engine cannot be told that a load has failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvbm.adapters import Adapters
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.client.mirror import Mirror
from kvbm.dialects.trtllm import hint_of_priorities
from kvbm.hashing import Chain
from kvbm.hints import read_hint
from kvbm.leader import Leader
from kvbm.leader.first_contact import ask_once
from kvbm.leader.tracked import Scheduled
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.settings import Settings, shared_request_notices
from kvbm.step_plan import LoadPlan, StepPlan, StepReport
from kvbm.trtllm_integration.engine_facts import KIND, EngineFacts
from kvbm.trtllm_integration.request_facts import (
    AdapterPaths,
    Unkept,
    adapter_number,
    asker_of,
    block_extras,
    media_reason,
    salt_of,
    tells_salt,
    told_of,
)
from kvbm.trtllm_integration.served import NO_PAGE, Served

log = logging.getLogger("kvbm.trtllm")

_CHAIN = b"kvbm-trtllm-block-key-1".ljust(32, b"\0")
LOAD_REPORT_S_MAX = 30.0
"""A load that some rank has not reported by then counts as ended: its lease shall not outlive it by more."""
ENDED_MAX = 4096
NO_LOAD = -1
"""The lookup and the epoch of a load that no rank can carry out."""


class SchedulerSide:
    """Calls `leader`, its own, for TensorRT-LLM. Called under a lock: by the engine's thread, and between
    its calls by the one that takes in the ranks' reports while the engine has nothing to do."""

    def __init__(
        self,
        facts: EngineFacts,
        settings: Settings,
        environment: Mapping[str, str],
        placeholders: frozenset[int],
    ) -> None:
        """`placeholders` are tokens that stand for media."""
        self.block_tokens = facts.block_tokens
        self._facts = facts
        self._address = ManagerAddress.of(settings, facts.engine)
        self._least_priority = settings.offload_min_priority
        self._placeholders = placeholders
        self._adapters = Adapters(Path(settings.runtime_dir) / "weights.json", time.monotonic)
        self._step_open = False
        self._paths = AdapterPaths()
        self.unkept = Unkept()
        self._served: dict[int, Served] = {}
        self._unnamed: dict[int, Served] = {}
        # Loads that went to the ranks, and when.
        self._loading: dict[str, float] = {}
        # Requests that ended, the latest few. One of them that comes again was preempted.
        self._ended: dict[int, None] = {}
        self._sizes_checked = False
        hello = Hello(
            version=PROTOCOL_VERSION,
            role="leader",
            engine=facts.engine,
            rank_count=facts.rank_count,
            kind=KIND,
        )
        self.leader = Leader(
            ManagerFinder(self._address, settings, environment, time.monotonic),
            hello,
            facts.block_tokens,
            promise_early=False,
            clock=time.monotonic,
            load_always=settings.onboard == "always",
            weights_version=settings.weights_version or "",
            at_once=True,
            mirror=Mirror(),
        )

    def matched(self, request: Any, computed_tokens: int) -> int:
        """How many tokens after those that the device has will be loaded before the next forward pass."""
        number = int(request.request_id)
        if number in self._served:
            self._forget(number)  # it was not run after all, and is matched anew
        tokens = [int(token) for token in request.get_tokens(0)]
        if reason := self._unkept_reason(request, tokens):
            self.unkept.note(reason)
            return 0
        chain = Chain.under(_CHAIN, self.block_tokens, tokens, block_extras(request, self.block_tokens))
        served = Served(
            str(number), chain, len(tokens), adapter=adapter_number(request), salted=bool(salt_of(request))
        )
        extras, keep = self._adapter(served)
        self._served[number] = served
        if extras is None:
            self._unnamed[number] = served
        whole, rest = divmod(computed_tokens, self.block_tokens)
        served.computed = whole
        # Of a request that is run again the engine reports only what is new: its blocks may not be known in time for a
        # load. Behind a part of a block nothing can be loaded either. And a report of its first load that is still to
        # come would end this one's lease. Blocks are stored all the same.
        again = number in self._ended or self.leader.lookups.loads(served.name)
        whole = len(chain.live_keys) if rest or again else whole
        served.promised = ask_once(
            self.leader,
            served.name,
            chain.live_keys,
            extras,
            whole,
            (len(tokens) - 1) // self.block_tokens,
            keep,
            told_of(request, tokens, self.block_tokens),
            asker_of(request),
        )
        return served.promised * self.block_tokens

    def _unkept_reason(self, request: Any, tokens: list[int]) -> str:
        if not tells_salt(request):
            return "this TensorRT-LLM does not say at the match which cache_salt a request has"
        if tokens and not (0 <= min(tokens) and max(tokens) < 1 << 32):
            return "tokens that are no numbers from 0 to 2**32 - 1"
        return media_reason(request, tokens, self._placeholders)

    def _adapter(self, served: Served) -> tuple[bytes | None, Any]:
        """What an adapter adds to the keys, and what is asked before blocks are committed. None: not known yet."""
        if served.adapter is None:
            return b"", None
        path = self._paths.path(served.adapter)
        if path is None:
            return None, None
        return self._adapters.extras(path), partial(self._adapters.unchanged, path)

    def allocated(self, request: Any, block_ids: list[int]) -> None:
        """The request has device blocks; with chunked prefill perhaps only its first ones."""
        self._paths.learn(request)
        served = self._served.get(int(request.request_id))
        if served is None:
            return
        served.allocated = list(block_ids)
        data = getattr(request, "py_multimodal_data", None)
        if data and not getattr(request, "multimodal_positions", None):
            self.unkept.note("multimodal input without positions and hashes")
            self._stop_storing(served)

    def step(self, output: Any) -> StepPlan:
        """The plan for the ranks: loads before the forward pass, stores after it."""
        self._end_step()
        self._end_old_loads()
        self._look_at_sizes()
        self._name_adapters()
        entries, broken = list[Scheduled](), list[LoadPlan]()
        prefill, positions = 0, 0.0
        for data, new in (
            *((d, True) for d in output.new_requests),
            *((d, False) for d in output.cached_requests),
        ):
            count = int(data.num_scheduled_tokens)
            if count > 1:
                prefill += count
                positions += count * (int(data.computed_position) + count / 2)
            served = self._served.get(int(data.request_id))
            if served is not None:
                self._report(served, data, new, broken)
                complete = served.complete_blocks(self.block_tokens)
                entries.append(Scheduled(served.name, complete, served.blocks()))
        plan = self.leader.step(
            entries,
            (),
            prefill,
            idle=not (output.new_requests or output.cached_requests),
            prefill_position=positions / prefill if prefill else 0.0,
        )
        self._step_open = bool(entries)
        now_s = time.monotonic()
        for load in plan.loads:
            self._loading[load.request] = now_s
            self._served[int(load.request)].carried = True
        loads = tuple(_with_pages(load) for load in plan.loads)
        return msgspec.structs.replace(plan, loads=(*loads, *broken))

    def _report(self, served: Served, data: Any, new: bool, broken: list[LoadPlan]) -> None:
        first, before = not served.reported, len(served.table)
        flat = not getattr(data, "new_block_ids_by_layer_group", None)
        if not first:
            served.later_report(data)
        elif served.first_report(data, new):
            self._plan_load(served, flat, broken)
        else:
            log.warning("the block table of request %s is not known: its blocks are not kept", served.name)
            self._stop_storing(served)
            if served.promised:
                broken.append(failing(served.name))
        priorities = getattr(data, "priorities", None)
        served.note_priorities(priorities, 0 if first else before, self._least_priority)
        if first and (hint := hint_of_priorities(priorities, self.block_tokens)):
            self.leader.client_words.says(served.name, read_hint(hint))  # the match did not tell them
        if getattr(data, "cache_salt", None) is not None and not served.salted:
            self.unkept.note("a cache_salt that the match did not show")
            self._stop_storing(served)
        served.advance(data, self.block_tokens, flat, first)

    def _plan_load(self, served: Served, flat: bool, broken: list[LoadPlan]) -> None:
        """Plan the promised load, now that its blocks are known."""
        if not served.promised:
            return
        # An engine that allocates chunk by chunk takes up no more of a promise than it has blocks for.
        room = max(0, min(served.promised, len(served.table) - served.computed))
        if room < served.promised and flat:
            self.leader.allocated(served.name, 0, ())
            broken.append(failing(served.name))
            return
        self.leader.allocated(served.name, room, served.table)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The engine will compute tokens `[start, end)` of what it was promised. Their blocks are loaded no more."""
        served = self._served.get(int(request.request_id))
        if served is None or served.reported or end <= start:
            return
        blocks = max(0, start // self.block_tokens - served.computed)
        served.promised = min(served.promised, blocks)
        if not served.promised:
            self.leader.allocated(served.name, 0, ())

    def finished(self, request: Any) -> bool:
        """The request ended, was aborted or preempted. Whether a rank may be reading its blocks still."""
        self._end_step()
        self._paths.learn(request)
        number = int(request.request_id)
        self._ended[number] = None
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        return self._forget(number)

    def request_reset(self, request: Any) -> None:
        """The request's blocks are gone already, and it will run again from the start."""
        served = self._served.get(int(request.request_id))
        if served is not None:
            self.leader.stores.give_up(served.name, begun=True)
            self._forget(int(request.request_id))
        self._ended.pop(int(request.request_id), None)

    def settle(self) -> bool:
        """Take in the ranks' reports, also where the engine does nothing. Whether more are to come."""
        self.leader.receive()
        return self.leader.stores.pending or self.leader.lookups.loading > 0

    def take_owed(self) -> list[str]:
        """Requests that were promised a load which no plan has carried; each is told once."""
        owed = [served for served in self._served.values() if served.promised and not served.carried]
        for served in owed:
            served.carried = True
        return [served.name for served in owed]

    def close(self) -> None:
        """End the session."""
        self.leader.close()

    def _forget(self, number: int) -> bool:
        served = self._served.pop(number, None)
        self._unnamed.pop(number, None)
        if served is None:
            return False
        reading = self.leader.stores.give_up(served.name)
        output_tokens = max(0, served.chain.tokens - served.prompt_tokens)
        self.leader.finished(served.name, output_tokens)
        return reading

    def _end_step(self) -> None:
        """The last plan's forward pass is over. The engine may do nothing for long after it: its first call counts."""
        if self._step_open:
            self._step_open = False
            self.leader.updated(None, (), set())

    def _stop_storing(self, served: Served) -> None:
        served.keep_blocks = 0

    def _name_adapters(self) -> None:
        """Give requests their keys whose adapters' digests have been made, or whose adapters' paths are known now."""
        for number, served in list(self._unnamed.items()):
            extras, keep = self._adapter(served)
            tracked = self.leader.requests.get(served.name)
            if extras is not None and tracked is not None:
                tracked.keep = keep
                self.leader.extras_known(served.name, extras)
                del self._unnamed[number]

    def _end_old_loads(self) -> None:
        """End loads whose reports will not come: the session that would bring them has ended, or a rank is silent."""
        for request, since_s in list(self._loading.items()):
            if not self.leader.lookups.loads(request):
                del self._loading[request]
            elif not self.leader.ready or time.monotonic() - since_s > LOAD_REPORT_S_MAX:
                del self._loading[request]
                self.leader.rank_reports.forget_load(request)
                self.leader.updated(StepReport(), (request,), set())

    def _look_at_sizes(self) -> None:
        if self._sizes_checked or not self.leader.tiers:
            return
        self._sizes_checked = True
        blocks = self.leader.tiers.get("host", 0)
        if self._address.private:
            return  # it writes to our log itself, and knows more
        for line in shared_request_notices(
            blocks, self.leader.block_bytes, self.block_tokens, self._facts.request_blocks
        ):
            log.warning("%s", line)


def failing(request: str) -> LoadPlan:
    """A load that no rank can carry out: each of them ends its engine rather than compute from other KV."""
    return LoadPlan(
        request=request,
        lookup=NO_LOAD,
        epoch=NO_LOAD,
        slots=(0,),
        generations=(0,),
        device_blocks=(0,),
        offset=0,
        ready=0,
    )


def _with_pages(load: LoadPlan) -> LoadPlan:
    """The load without blocks that have no memory on the device: nobody reads them there."""
    if NO_PAGE not in load.device_blocks:
        return load
    places = [place for place, block in enumerate(load.device_blocks) if block != NO_PAGE]
    return msgspec.structs.replace(
        load,
        slots=tuple(load.slots[place] for place in places),
        generations=tuple(load.generations[place] for place in places),
        device_blocks=tuple(load.device_blocks[place] for place in places),
        ready=sum(place < load.ready for place in places),
    )
