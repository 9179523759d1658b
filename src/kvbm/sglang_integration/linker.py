"""`KvbmLinker`: SGLang's interface for external caches on one side, pages at a KVBM manager on the other.

There is no host pool of SGLang's own: pages go between the device and the manager's host memory, the load layer by
layer, beside the forward pass that reads them. SGLang asks in its scheduler's thread, when it matches a request, so
the answer comes from a mirror of what the manager holds. SGLang aborts a request whose load fails, so a load is only
accepted once its pages are leased and lie in host memory; a lease that does not come in time means computing.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.utils import get_device_module

from kvbm.block import BlockKey
from kvbm.errors import KvbmError
from kvbm.guard import Guard
from kvbm.sglang_integration.deployment import Deployment
from kvbm.sglang_integration.device_pages import DevicePages
from kvbm.sglang_integration.device_pools import pool_group
from kvbm.sglang_integration.linked_loads import DEADLINE, UNUSED, Asked, LinkedLoads, Wanted, on_device_of
from kvbm.sglang_integration.pages_kept import PagesKept
from kvbm.sglang_integration.versions import warn_if_untested

log = logging.getLogger("kvbm.sglang")

LEASE_WAIT_S = 0.002
"""How long the scheduler's thread waits for a lease that was asked for when the request was matched."""
LEASE_WAIT_ALWAYS_S = 1.0
"""The same where a hit is to be loaded in any case (`DYN_KVBM_ONBOARD=always`, for tests)."""
QUIESCE_S = 5.0
"""How long SGLang waits for us where it empties its caches: for the part of a store that is being copied."""
ASKED_MAX = 1024
_instances = itertools.count(1)


class KvbmLinker(UnifiedCacheLinker):
    """See the module. One per rank, called by the scheduler's thread alone."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        """Raises KvbmError in one line for a setting that cannot be used, and ValueError for a model whose pools SGLang
        does not give to linkers."""
        warn_if_untested()
        self.forward_stream = forward_stream
        group = pool_group(params, components)
        self._group = group
        self.pools = group.entry_map
        self.layer_done_counter = LayerWiseLoadCounter(group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._rank_groups = _rank_groups(params)
        rank = torch.distributed.get_rank(self._rank_groups[-1]) if self._rank_groups else 0
        ranks = torch.distributed.get_world_size(self._rank_groups[-1]) if self._rank_groups else 1
        self._stores = not group.rank_replicated or rank == 0
        extra = dict(extra_config or {})
        self._deployment = Deployment.of_process(
            name=f"linker-{next(_instances)}",
            rank=f"tp{rank}-pp{params.pp_rank}-cp{params.attn_cp_rank}",
            data_parallel_rank=0,
            shape=f"tp{ranks} pp{params.pp_rank}/{params.pp_size} cp{params.attn_cp_size} linker",
            extra_config=extra.get("kvbm"),
        )
        always = self._deployment.settings.onboard == "always"
        self._lease_wait_s = LEASE_WAIT_ALWAYS_S if always else LEASE_WAIT_S
        own = "" if group.rank_replicated else f"tp{rank}"
        self._pages = {str(name): DevicePages(entry, group.num_layers) for name, entry in self.pools.items()}
        self._kept: dict[str, PagesKept] = {
            name: self._deployment.pages_kept(
                name,
                pages.entry.device_pool,
                pages,
                f"{own} cp{params.attn_cp_rank}",
                page_tokens=params.page_size,
            )
            for name, pages in self._pages.items()
        }
        self._loads = LinkedLoads(self._kept, self._pages, group.num_layers, time.monotonic)
        # Leases that were asked for: what for, the first page's key (which changes with the weights), and whether they
        # came; loads that were accepted; stores that are under way, in order.
        self._leases: dict[str, tuple[dict[str, Asked], list[BlockKey] | None, Future[bool]]] = {}
        self._queued: list[str] = []
        self._life = 0
        self._guard = Guard(log)
        self._offloads: deque[Future[bool]] = deque()
        self._keeper = self._deployment.keeper(self._event, self._descriptors)
        self._keeper.submit(on_device_of(self._pages), None)
        self._deployment.expect_pools(len(self._kept), params.pp_size)
        self._deployment.wait_for_weights()
        for pool in self._kept.values():
            self._deployment.begin(self._keeper, pool)

    # ---- what is held

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every number of leading pages that all pools hold in host memory, from the mirror. A lease is asked for at
        once, with which pages that are only on disk are brought up for the next time."""
        nothing: list[int] = []
        return self._guard.call(nothing, self._lookup, rid, transfers)

    def _lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        by_name = {str(transfer.name): transfer for transfer in transfers}
        kv = by_name.get(PoolName.KV.value)
        sources = {name: by_name.get(str(self._group.sources[PoolName(name)])) for name in self._pages}
        if kv is None or not kv.keys or any(source is None for source in sources.values()):
            return []
        hashes = list(kv.keys)
        ends, windows = list(range(1, len(hashes) + 1)), dict[str, int]()
        for name, source in sources.items():
            keys, mirror = self._kept[name].keys(hashes), self._kept[name].mirror
            if keys is None or source is None:
                return []
            if source.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                each, windows[name] = mirror.each_in_host(keys), max(1, len(source.keys or ()))
                ends = [end for end in ends if all(each[max(0, end - windows[name]) : end])]
            else:
                held = mirror.in_host(keys)
                ends = [end for end in ends if end <= held]
        self._ask(rid, hashes, windows, ends[-1] if ends else 0)
        return ends

    def _ask(self, rid: str, hashes: list[str], windows: dict[str, int], end: int) -> None:
        """Have a request's pages leased, if that was not asked for already: a request that waits is matched again."""
        asked = {}
        for name in self._pages:
            window = windows.get(name)
            if window is None:
                asked[name] = Asked(hashes, end)
            elif end:
                part = hashes[max(0, end - window) : end]
                asked[name] = Asked(part, len(part))
        known, named = self._leases.get(rid), self._kept[PoolName.KV.value].keys(hashes[:1])
        if (
            known is not None
            and known[:2] == (asked, named)
            and not (end and known[2].done() and not _true(known[2]))
        ):
            return
        self._leases[rid] = asked, named, self._keeper.submit(lambda: self._loads.lease(rid, asked), False)
        while len(self._leases) > ASKED_MAX:
            del self._leases[next(iter(self._leases))]

    # ---- loads

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Accept a load whose pages are leased; False, on all ranks alike, where some are not."""
        nothing: list[Wanted] = []
        wanted = self._guard.call(nothing, self._of_pools, transfers)
        if not self._all_ranks(bool(wanted) and self._guard.call(False, self._accepted, rid, wanted)):
            self._release(rid, DEADLINE)
            return False
        self._queued.append(rid)
        return True

    def _accepted(self, rid: str, wanted: list[Wanted]) -> bool:
        self._leases.pop(rid, None)
        verdict = self._keeper.submit(lambda: self._loads.accept(rid, wanted), False)
        done = concurrent.futures.wait((verdict,), self._lease_wait_s).done
        if not done and verdict.cancel():
            return False
        return bool(done) and _true(verdict)  # late: the engine computes, and what is accepted is released

    def _of_pools(self, transfers: list[PoolTransfer]) -> list[Wanted]:
        """What is to be moved of each physical pool; nothing where SGLang's indices are no pages of it."""
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        wanted = []
        for transfer in expanded:
            pages = self._pages[str(transfer.name)]
            try:
                numbers = pages.numbers(transfer.host_indices.cpu())
            except KvbmError as error:
                log.warning("pages are not moved: %s", error)
                return []
            if len(numbers) != len(transfer.keys):
                return []
            wanted.append(Wanted(str(transfer.name), list(transfer.keys), numbers))
        return wanted

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not begun."""
        if rid not in self._queued:
            return False
        self._queued.remove(rid)
        self._release(rid)
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin the accepted loads; the index of their batch, -1 where there are none."""
        if not self._queued:
            return -1
        batch, self._queued = self._queued, []
        counter = self.layer_done_counter
        index = int(counter.update_producer())
        event = get_device_module().Event()
        event.record()
        begun = self._keeper.submit(
            lambda: self._loads.load(index, batch, counter, event, lambda: self._keeper.busy), False
        )
        # Of a keeper that has ended, or is overwhelmed, no layer would ever come.
        begun.add_done_callback(
            lambda done: None if _true(done) else counter.fail(index, KvbmError("KVBM cannot load"))
        )
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until nothing of a batch is written any more; whether all of it arrived."""
        return bool(self.layer_done_counter.finish(counter_index))

    # ---- stores

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue a store of all these pages, to be kept as a whole; False where they cannot be kept."""
        return self._guard.call(False, self._offload, transfers)

    def _offload(self, transfers: list[PoolTransfer]) -> bool:
        now, life = self._deployment.watch.now, self._life
        wanted = self._of_pools(transfers) if now.unmixed else []
        if not wanted:
            return False
        if not self._stores:
            done: Future[bool] = Future()
            done.set_result(True)
            self._offloads.append(done)
            return True
        events = self.record_offload_ready()

        def valid() -> bool:
            return self._life == life and self._deployment.watch.now.changes == now.changes

        self._offloads.append(self._keeper.submit(lambda: self._store(wanted, events, valid), False))
        return True

    def _store(
        self, wanted: list[Wanted], events: list[Any], valid: Callable[[], bool]
    ) -> Generator[None, None, bool]:
        while not all(event.query() for event in events):
            yield
        kept = True
        for each in wanted:
            stored = yield from self._kept[each.pool].store(each.hashes, each.numbers, valid=valid)
            kept = kept and all(stored)
        return kept

    def num_completed_offloads(self) -> int:
        """How many stores have ended, in the order in which they were queued."""
        return sum(1 for _ in itertools.takewhile(Future.done, self._offloads))

    def pop_completed_offload(self) -> bool:
        """The outcome of the oldest store, which has ended."""
        return _true(self._offloads.popleft())

    # ---- the rest

    def reset(self) -> None:
        """SGLang empties its caches: end what is under way, and forget what was asked."""
        self._quiesce()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """End everything and leave the manager. Pages that are kept stay."""
        self._quiesce()
        self._keeper.close(self._leave, QUIESCE_S)

    def _quiesce(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._life += 1  # stores end before their next part
        deadline_s = time.monotonic() + QUIESCE_S
        for store in self._offloads:
            if not store.cancel():
                _settled(store, deadline_s - time.monotonic())
        self._offloads.clear()
        self._leases.clear()
        # A job behind all others: when it has run, no load is under way.
        self._keeper.call(self._loads.close, None, QUIESCE_S)

    def _release(self, rid: str, reason: str = UNUSED) -> None:
        self._leases.pop(rid, None)
        self._keeper.submit(lambda: self._loads.drop(rid, reason), None)

    def _all_ranks(self, mine: bool) -> bool:
        """Whether all ranks say so: they must take the same way."""
        if not self._rank_groups:
            return mine
        verdict = torch.tensor([int(mine)], dtype=torch.int)
        for group in self._rank_groups:
            torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(verdict.item())

    def _event(self) -> None:
        for pool in self._kept.values():
            pool.tick()
        self._loads.tick()

    def _descriptors(self) -> list[int]:
        return [fd for pool in self._kept.values() for fd in pool.descriptors()]

    def _leave(self) -> None:
        for pool in self._kept.values():
            pool.close()


def _true(result: Future[bool]) -> bool:
    return not result.cancelled() and result.exception() is None and result.result()


def _settled(result: Future[bool], timeout_s: float) -> None:
    wait: Callable[..., Any] = result.exception
    try:
        wait(max(0.0, timeout_s))
    except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
        # It takes longer than SGLang may wait, or was dropped.
        log.warning("a store is still under way while SGLang empties its caches")


def _rank_groups(params: Any) -> list[Any]:
    """SGLang's groups of ranks that must decide alike; the last one is that of tensor parallelism."""
    if not torch.distributed.is_initialized():
        return []
    groups = (params.attn_cp_cache_group, params.attn_tp_cache_group or params.tp_cache_group)
    return [g for g in groups if g is not None and torch.distributed.get_world_size(group=g) > 1]
