"""The scheduler's half of the connector: turns vLLM's requests and steps into calls of `Leader`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbm.adapters import Adapters
from kvbm.block import Tier
from kvbm.client.far_finder import find_nodes
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.leader import Leader
from kvbm.leader.tracked import Scheduled, StateOffer
from kvbm.observe.otel import open_sink
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.settings import Settings, shared_request_notices, size_notices
from kvbm.step_plan import StepPlan, StepReport
from kvbm.vllm_integration import stats
from kvbm.vllm_integration.block_hashes import EngineHashes, OwnHashes, hashes_are_deterministic
from kvbm.vllm_integration.block_pool import PoolBlocks
from kvbm.vllm_integration.block_tables import BlockTables, table_of
from kvbm.vllm_integration.hybrid import Hybrid, hybrid_of
from kvbm.vllm_integration.kv_events import EventForm, events_wanted, says_of
from kvbm.vllm_integration.ranks import block_tokens
from kvbm.vllm_integration.request_facts import answer, asker_of, told_of
from kvbm.vllm_integration.support import answers_are_merged, layerwise_is_free, layerwise_refusal
from kvbm.vllm_integration.weight_files import MEMO

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM < 0.32 does not split hits by source
    CacheHitSource = None

log = logging.getLogger("kvbm.vllm")

_NO_EVENTS = (
    "no KV events of host memory and disk: this vLLM's block hashes differ in every process "
    "(prefix_caching_hash_algo=sha256 and vLLM 0.29 or later have others)"
)


_ENDS_IN_STEP = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""How requests end within `update_from_output`; those that are aborted may end between steps."""


class SchedulerSide:
    """Calls `leader`, its own, for vLLM. Owned by the engine core's thread."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, settings: Settings, environment: Mapping[str, str]
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._hybrid = hybrid_of(kv_cache_config)
        if self._hybrid is not None:
            self.block_tokens = self._hybrid.block_tokens
            self._request_blocks = self._hybrid.request_blocks(int(vllm_config.model_config.max_model_len))
        else:
            self.block_tokens = block_tokens(vllm_config, kv_cache_config.kv_cache_groups[0].kv_cache_spec)
            self._request_blocks = -(-int(vllm_config.model_config.max_model_len) // self.block_tokens)
        self._own_hashes = not hashes_are_deterministic(vllm_config)
        self._adapters = Adapters(Path(settings.runtime_dir) / MEMO, time.monotonic)
        self._requests: dict[str, Any] = {}
        # Requests whose adapter's digest is not made yet.
        self._unnamed: dict[str, Any] = {}
        self._digests_seen = 0
        self._tables = BlockTables()
        self._blocks = PoolBlocks()
        self._device_blocks = int(kv_cache_config.num_blocks)
        self._sizes_checked = False
        self._weights_may_change = getattr(vllm_config, "weight_transfer_config", None) is not None or bool(
            getattr(vllm_config.model_config, "enable_sleep_mode", False)
        )
        self._address = ManagerAddress.of(settings, transfer.engine_id)
        finder = ManagerFinder(self._address, settings, environment, time.monotonic)
        hello = Hello(
            version=PROTOCOL_VERSION,
            role="leader",
            engine=transfer.engine_id,
            rank_count=int(vllm_config.parallel_config.world_size),
            device_blocks=self._device_blocks,
        )
        layerwise = settings.onboard_mode == "layerwise" or (
            settings.onboard_mode == "auto" and layerwise_is_free(vllm_config)
        )
        zeroes = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
        if self._hybrid is not None or zeroes:
            if layerwise and settings.onboard_mode != "auto":
                log.warning("onboard_mode=layerwise has no effect: this model has several kinds of KV blocks")
            layerwise = False
        refusal = layerwise_refusal(vllm_config) if layerwise else ""
        if refusal:
            log.warning(
                "hits are loaded before their requests, not layer by layer, though CUDA graphs stay piecewise: %s",
                refusal,
            )
        self._events = self._event_form(vllm_config, kv_cache_config)
        self._spans = open_sink(transfer.engine_id) if settings.traces else None
        self.leader = Leader(
            finder,
            hello,
            self.block_tokens,
            promise_early=transfer.kv_load_failure_policy == "recompute",
            clock=time.monotonic,
            load_always=settings.onboard == "always",
            layerwise=layerwise and not refusal,
            device=self._blocks,
            weights_version=settings.weights_version or "",
            spans=self._spans,
            groups=self._hybrid.groups if self._hybrid is not None else (),
            zeroes=zeroes,
            announces=self._events is not None,
            nodes=find_nodes(settings, time.monotonic),
        )
        self._counted, self._answers = stats.Counted(self.leader), answers_are_merged()

    def bind_block_pool(self, pool: Any) -> None:
        """Take vLLM's block pool, which knows the blocks on the device."""
        self._blocks.pool = pool
        self._blocks.take_reset()  # from here on a new index is a reset

    def added(self, request: Any) -> None:
        """A request arrived: ask the manager now, long before it is scheduled."""
        self._notice_reset()
        self._requests[request.request_id] = request
        lora = request.lora_request
        extras: bytes | None = b""
        keep = None
        if lora is not None:
            extras = self._adapter_extras(lora)
            if extras is None and not self._may_keep(lora):
                return
            if extras is None:
                self._unnamed[request.request_id] = request
            keep = partial(self._adapters.unchanged, lora.lora_path)
        hashes = OwnHashes(request, self.block_tokens) if self._own_hashes else EngineHashes(request)
        # Of several groups the scheduler alone knows what the device can take up.
        on_device = self._blocks.on_device(request.block_hashes) if self._hybrid is None else 0
        told = told_of(request, self.block_tokens)
        trace = getattr(request, "trace_headers", None)
        before_tail = (request.num_tokens - 1) // self.block_tokens
        says = says_of(request, self.block_tokens, self._facts_wanted) if not self._own_hashes else None
        self.leader.request_added(
            request.request_id,
            hashes,
            extras,
            on_device,
            keep,
            told,
            trace,
            before_tail,
            says,
            asker_of(request),
        )

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the computed ones can be loaded (None: ask again), and whether the request waits."""
        computed = num_computed_tokens // self.block_tokens
        if self.leader.is_postponed(request.request_id, computed):
            return None, False
        self._notice_reset()
        if request.request_id not in self._requests:
            self.added(request)
        elif request.lora_request is not None:
            self._look_at_adapter(request)
        unnamed = request.request_id in self._unnamed and self.leader.ready
        if unnamed and self._adapters.awaited(request.lora_request.lora_path):
            return None, False
        before_tail = (request.num_tokens - 1) // self.block_tokens
        answer = self.leader.matched(request.request_id, computed, before_tail)
        if answer.later:
            return None, False
        return answer.blocks * self.block_tokens, answer.blocks > 0 and not answer.layerwise

    def hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """The split of a promised hit over the tiers, in tokens."""
        if CacheHitSource is None or num_external_tokens <= 0:
            return {}
        blocks = -(-num_external_tokens // self.block_tokens)
        tokens = self.leader.promised_sources(request.request_id, blocks)
        on_host = min(tokens.count(Tier.HOST) * self.block_tokens, num_external_tokens)
        away = min(tokens.count(Tier.REMOTE) * self.block_tokens, num_external_tokens - on_host)
        split = {
            CacheHitSource.HOST: on_host,
            CacheHitSource.DISK: num_external_tokens - on_host - away,
            CacheHitSource.EXTERNAL_UNSPECIFIED: away,  # of a store or another node vLLM has no better word
        }
        return {source: count for source, count in split.items() if count}

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has device blocks now: plan its load, or drop its lookup."""
        count = -(-num_external_tokens // self.block_tokens)
        table = table_of(blocks) if count > 0 else ()
        tables = self._hybrid.allocated(blocks) if self._hybrid is not None and count > 0 else ()
        self.leader.allocated(request.request_id, count, table, tables)

    def step(self, output: Any) -> StepPlan:
        """The plan that goes to the ranks with this step's scheduler output."""
        self._notice_reset()
        if not self._sizes_checked and self.leader.tiers:
            self._sizes_checked = True
            self._warn_of_sizes(self.leader.tiers.get("host", 0))
            if self._own_hashes and self._facts_wanted():
                log.warning(_NO_EVENTS)
        if self._unnamed and self._digests_seen != self._adapters.digests_made:
            self._digests_seen = self._adapters.digests_made
            for request in list(self._unnamed.values()):
                self._look_at_adapter(request)
        scheduled_tokens: dict[str, int] = output.num_scheduled_tokens
        self._tables.update(output)
        preempted = getattr(output, "preempted_req_ids", None) or ()
        entries, states, followed = [], self._tables.states, self.leader.requests
        eventful = {*states, *preempted}
        prefill, positions = 0, 0.0
        for request_id, token_count in scheduled_tokens.items():
            if token_count > 1:
                prefill += token_count
                request = self._requests.get(request_id)
                computed = request.num_computed_tokens if request is not None else 0
                positions += token_count * (computed + token_count / 2)
            tracked = followed.get(request_id)
            if tracked is None:
                continue
            tracked.quiet_tokens -= token_count
            if tracked.quiet_tokens > 0 and request_id not in eventful:
                continue  # as in almost every step: hundreds of requests get a token each
            computed = self._requests[request_id].num_computed_tokens
            # With guesses that may be wrong. Only blocks that the engine has hashed are stored: it hashes no guess.
            complete = (computed + token_count) // self.block_tokens
            if request_id in eventful or tracked.has_offers(complete):
                entries.append(self._entry(request_id, computed, complete, states.get(request_id)))
            elif complete <= tracked.stored:
                tracked.quiet_tokens = (complete + 1) * self.block_tokens - computed - token_count
        return self.leader.step(
            entries,
            preempted,
            prefill,
            idle=not output.total_num_scheduled_tokens,
            prefill_position=positions / prefill if prefill else 0.0,
        )

    def _entry(
        self, name: str, computed: int, complete: int, states: Sequence[tuple[int, int, int]] | None
    ) -> Scheduled:
        """A request in this step, and the recurrent states that it leaves behind."""
        table = partial(self._tables.get, name)
        hybrid = self._hybrid
        if hybrid is None:
            return Scheduled(name, complete, table, computed_tokens=computed)
        tables = partial(self._group_tables, name, hybrid)
        if not states:
            return Scheduled(name, complete, table, tables, computed_tokens=computed)
        offers = tuple(
            StateOffer(hybrid.ids.index(group), block, tokens // self.block_tokens)
            for group, block, tokens in states
            if group in hybrid.ids and tokens % self.block_tokens == 0
        )
        return Scheduled(name, complete, table, tables, offers, computed)

    def _group_tables(self, request_id: str, hybrid: Hybrid) -> list[Sequence[int]]:
        return hybrid.in_order(self._tables.of_groups(request_id))

    def updated(self, connector_output: Any, report: StepReport | None) -> None:
        """Take in the ranks' reports of a step."""
        arrived = getattr(connector_output, "finished_recving", None) or ()
        invalid = getattr(connector_output, "invalid_block_ids", None) or set()
        failed = getattr(connector_output, "failed_recving", None) or ()
        self.leader.updated(report, arrived, invalid, failed)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]] = ()) -> dict[str, Any] | None:
        """The request ended or was aborted; of several groups these are the block tables. Returns what its client is
        told of its hint."""
        told = answer(self.leader.client_words.verdicts(request.request_id)) if self._answers else None
        self._requests.pop(request.request_id, None)
        self._unnamed.pop(request.request_id, None)
        self._tables.drop(request.request_id)
        tables = self._hybrid.in_order(block_ids) if self._hybrid is not None and block_ids else ()
        # The last token was sampled, and not computed.
        complete = min(request.num_computed_tokens, request.num_tokens - 1) // self.block_tokens
        ends_in_step = getattr(getattr(request, "status", None), "name", "") in _ENDS_IN_STEP
        self.leader.finished(request.request_id, request.num_output_tokens, tables, complete, ends_in_step)
        return told

    @property
    def work_pending(self) -> bool:
        """Whether stores or loads are under way that the engine should step on for."""
        return self.leader.stores.pending or self.leader.lookups.loading > 0

    def reset(self) -> bool:
        """Forget all blocks. vLLM tried to empty its device's cache earlier in the same call: that is no second
        reset, and it fails while a request has blocks."""
        emptied = self._blocks.take_reset() or self._blocks.pool is None
        return self.leader.reset(keep_disk=self._weights_may_change, device_emptied=emptied)

    def give_up_pins(self) -> bool:
        """The engine is about to empty its cache. True if something kept it from that."""
        return self.leader.stores.give_up_pins()

    def weights_changed(self) -> None:
        """The ranks compute with other weights, and their weights may change again."""
        self._weights_may_change = True
        self.leader.weights_changed()

    def weights_named(self, version: str) -> None:
        self.leader.weights_named(version)

    def take_events(self) -> list[Any]:
        """vLLM's events of what came into the tiers and left them since the last call."""
        return self._events(self.leader.announced.take()) if self._events is not None else []

    def take_stats(self) -> stats.KvbmStats | None:
        """The counts since the last call; None when there are none. vLLM asks at the end of each step."""
        self.leader.flush()
        return self._counted.since_last()

    def close(self) -> None:
        self.leader.close()
        if self._spans is not None:
            self._spans.close()

    def _facts_wanted(self) -> bool:
        return self.leader.announced.facts_wanted

    def _event_form(self, vllm_config: Any, kv_cache_config: Any) -> EventForm | None:
        """How events are written for vLLM, where it publishes some and they would mean something."""
        if not events_wanted(vllm_config):
            return None
        if self._own_hashes:
            log.warning(_NO_EVENTS)
            return None
        number = self._hybrid.ids[0] if self._hybrid is not None else 0
        return EventForm(self.block_tokens, number, kv_cache_config.kv_cache_groups[number].kv_cache_spec)

    def _notice_reset(self) -> None:
        """A trainer empties the device's cache after an update of the weights, often without a call to connectors."""
        if self._blocks.take_reset():
            self.leader.device_was_reset(self._weights_may_change)

    def _warn_of_sizes(self, host_blocks: int) -> None:
        """Warn of an odd size of the host tier. A private manager writes to our log itself, and knows more."""
        lines = size_notices(host_blocks, self._device_blocks)
        if not self._address.private:
            lines += shared_request_notices(
                host_blocks,
                self.leader.block_bytes,
                0 if self._hybrid is not None else self.block_tokens,
                self._request_blocks,
            )
        for line in lines:
            log.warning("%s", line)

    def _may_keep(self, lora: Any) -> bool:
        """Whether blocks of requests with this adapter can be kept at all: weights without a file have no name."""
        return getattr(lora, "lora_tensors", None) is None and not self._adapters.refused(lora.lora_path)

    def _adapter_extras(self, lora: Any) -> bytes | None:
        """The part of the key that vLLM's block hash lacks, an adapter's content; None while it is not known."""
        return self._adapters.extras(lora.lora_path, lora.lora_int_id) if self._may_keep(lora) else None

    def _look_at_adapter(self, request: Any) -> None:
        """The request goes on: its adapter may have been digested meanwhile, or have changed."""
        lora, name = request.lora_request, request.request_id
        extras = self._adapter_extras(lora)
        if extras is not None:
            self._unnamed.pop(name, None)
            self.leader.extras_known(name, extras)
        elif not self._may_keep(lora):
            self._unnamed.pop(name, None)
            self.leader.unkeep(name)
