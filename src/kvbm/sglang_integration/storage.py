"""`KvbmStorage`: SGLang's HiCache storage interface on one side, pages at a KVBM manager on the other.

SGLang keeps a host pool of its own; this backend is the tier below it. Nothing here can end a request: a call that
fails is a miss. No call of the scheduler's thread waits for the manager but those that an operator makes.

Loaded by SGLang with `--hicache-storage-backend dynamic` and, as its extra config, `backend_name`, `module_path` and
`class_name`; with `"interface_v1": 1` pages are copied without a stop in between.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvbm.errors import KvbmError
from kvbm.sglang_integration.deployment import Deployment
from kvbm.sglang_integration.host_pages import StagedPages, pages_of
from kvbm.sglang_integration.pages_kept import PagesKept
from kvbm.sglang_integration.versions import warn_if_untested

log = logging.getLogger("kvbm.sglang")

ASK_S = 3.0
"""How long one of SGLang's threads waits for its turn to ask, to read or to write."""
CLOSE_S = 10.0
_instances = itertools.count(1)


class KvbmStorage(HiCacheStorage):
    """See the module. One per rank; SGLang reduces the answers of all ranks to what every one of them has."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """`kwargs` is SGLang's second argument of dynamic backends; nothing in it is needed."""
        warn_if_untested()
        self._config = storage_config
        extra = dict(storage_config.extra_config or {})
        self._zero_copy = bool(extra.get("interface_v1", 0))
        shape = (
            f"tp{storage_config.tp_size} pp{storage_config.pp_rank}/{storage_config.pp_size} "
            f"cp{storage_config.attn_cp_size} dcp{storage_config.dcp_size}"
        )
        # Pages that all ranks hold alike are kept once.
        own = "" if storage_config.is_mla_model else f"tp{storage_config.tp_rank}"
        self._place = f"{own} cp{storage_config.attn_cp_rank} dcp{storage_config.dcp_rank}"
        self._deployment = Deployment.of_process(
            name=f"storage-{next(_instances)}",
            rank=f"tp{storage_config.tp_rank}-pp{storage_config.pp_rank}-cp{storage_config.attn_cp_rank}",
            data_parallel_rank=storage_config.dp_rank,
            shape=shape,
            extra_config=extra.get("kvbm"),
        )
        self._pools: dict[str, PagesKept] = {}
        self._keeper = self._deployment.keeper(self._tick, self._descriptors)

    # ---- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's host pool of KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool of a hybrid model, or KV once more."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(host_pool_name, host_pool)

    def on_host_pools_registered(self) -> None:
        """All pools are known: join the manager. Raises KvbmError in one line where our own cannot be started as it was
        set up; a shared one that is absent is joined later."""
        self._deployment.expect_pools(len(self._pools), self._config.pp_size)
        self._deployment.wait_for_weights()
        for pool in self._pools.values():
            self._deployment.begin(self._keeper, pool)

    def _add(self, name: Any, host_pool: Any) -> None:
        if str(name) in self._pools or getattr(host_pool, "size", 0) == 0:
            return
        staged = str(name) == PoolName.KV.value and not self._zero_copy
        try:
            pages = StagedPages(host_pool) if staged else pages_of(host_pool)
        except (KvbmError, NotImplementedError, AttributeError, ValueError) as error:
            log.warning("pool %s of SGLang is not kept: %s", name, error)
            return
        chained = str(name) == PoolName.KV.value
        self._pools[str(name)] = self._deployment.pages_kept(
            str(name), host_pool, pages, self._place, mirrored=not chained
        )

    # ---- what is held

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages are held in a row, from the first on."""
        pool = self._pools.get(PoolName.KV.value)
        if pool is None or not keys:
            return 0
        prefix = _prefix(extra_info)
        return self._keeper.call(lambda: pool.held(keys, prefix), 0, ASK_S)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that KV and all other pools can restore together, and all shorter ones that they can."""
        pages = self.batch_exists(keys, extra_info)
        ends = list(range(1, pages + 1))
        found: dict[str, int] = {PoolName.KV: pages} if pages else {}
        for transfer in pool_transfers or ():
            ends = self._restorable(transfer, keys[:pages], ends) if ends else []
            found[transfer.name] = ends[-1] if ends else 0
        return PoolTransferResult(ends[-1] if ends else 0, found, ends)

    def _restorable(self, transfer: PoolTransfer, keys: Sequence[str], ends: list[int]) -> list[int]:
        """Which of these ends of a prefix a pool can restore too."""
        pool = self._pools.get(str(transfer.name))
        if pool is None:
            return []
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            held = self._keeper.call(lambda: pool.held(keys), 0, ASK_S)
            return [end for end in ends if end <= held]
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            return []
        window = max(1, len(transfer.keys or ()))
        nothing = [False] * len(keys)
        each = self._keeper.call(lambda: pool.each_held(keys), nothing, ASK_S)
        return [end for end in ends if all(each[max(0, end - window) : end])]

    # ---- reads

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Flat pages, each in its target; None from the first on that is not held."""
        targets = list(target_locations or ())
        pool = self._pools.get(PoolName.KV.value)
        if pool is None or len(targets) != len(keys) or not isinstance(pool.pages, StagedPages):
            return [None] * len(keys)
        staged, found = pool.pages, list[torch.Tensor | None]([None] * len(keys))

        def taken(positions: Sequence[int]) -> None:
            for row, position in enumerate(positions):
                flat, target = staged.flat(row), targets[position]
                found[position] = flat.clone() if target is None else target.copy_(flat.view_as(target))

        self._keeper.call(lambda: pool.load(keys, range(len(keys)), taken), list[bool](), ASK_S)
        return found

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Bring pages into SGLang's host pool; which ones arrived."""
        return self._load(PoolName.KV.value, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same for several pools; which of each one's pages arrived."""
        return {
            transfer.name: self._load(str(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def _load(self, name: str, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool, missing = self._pools.get(name), [False] * len(keys)
        numbers = _numbers(pool, keys, host_indices)
        if pool is None or numbers is None:
            return missing
        return self._keeper.call(lambda: pool.load(keys, numbers), missing, ASK_S)

    # ---- writes

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Keep flat pages; whether all of them are kept now."""
        pool = self._pools.get(PoolName.KV.value)
        valid = self._valid()
        if pool is None or not isinstance(pool.pages, StagedPages) or valid is None:
            return False
        staged = pool.pages

        def fill(row: int, position: int) -> None:
            staged.fill(row, values[position])

        missing = [False] * len(keys)
        return all(
            self._keeper.call(lambda: pool.store(keys, range(len(keys)), (), fill, valid), missing, ASK_S)
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Keep pages of SGLang's host pool; which ones are kept now."""
        return self._store(PoolName.KV.value, keys, host_indices, _prefix(extra_info))

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same for several pools."""
        return {
            transfer.name: self._store(str(transfer.name), transfer.keys or [], transfer.host_indices, ())
            for transfer in transfers
        }

    def _store(
        self, name: str, keys: list[str], host_indices: torch.Tensor | None, prefix: Sequence[str]
    ) -> list[bool]:
        pool, missing = self._pools.get(name), [False] * len(keys)
        numbers = _numbers(pool, keys, host_indices)
        valid = self._valid()
        if pool is None or numbers is None or valid is None:
            return missing
        return self._keeper.call(lambda: pool.store(keys, numbers, prefix, valid=valid), missing, ASK_S)

    def _valid(self) -> Callable[[], bool] | None:
        """Whether SGLang's own pages are still computed with the weights of now; None where they are not."""
        watch, now = self._deployment.watch, self._deployment.watch.now
        return (lambda: watch.now.changes == now.changes) if now.unmixed else None

    # ---- the rest

    def clear(self) -> None:
        """Drop all pages of this model that no other engine uses."""
        self._keeper.call(lambda: sum(pool.clear() for pool in self._pools.values()), 0, ASK_S)

    def get_stats(self) -> StorageMetrics:
        """Pages and GB a second since the last call, for SGLang's own metrics."""
        metrics = StorageMetrics()
        for pool in self._pools.values():
            counts, pool.counts = pool.counts, type(pool.counts)()
            gigabytes = pool.pages.page_bytes / 1e9
            if counts.loaded:
                metrics.prefetch_pgs.append(counts.loaded)
                metrics.prefetch_bandwidth.append(counts.loaded * gigabytes / max(counts.load_s, 1e-9))
            if counts.stored:
                metrics.backup_pgs.append(counts.stored)
                metrics.backup_bandwidth.append(counts.stored * gigabytes / max(counts.store_s, 1e-9))
        return metrics

    def close(self) -> None:
        """SGLang detaches this backend: leave the manager. Pages that are kept stay."""
        self._keeper.close(self._leave, CLOSE_S)

    def _leave(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _tick(self) -> None:
        for pool in list(self._pools.values()):
            pool.tick()

    def _descriptors(self) -> list[int]:
        return [fd for pool in list(self._pools.values()) for fd in pool.descriptors()]


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    """The pages before the call's, where SGLang passes them on (`hicache_storage_pass_prefix_keys`)."""
    return (extra_info.prefix_keys or ()) if extra_info is not None else ()


def _numbers(pool: PagesKept | None, keys: list[str], host_indices: torch.Tensor | None) -> list[int] | None:
    """The pool's pages that these indices are of, one for each key; None where that does not fit."""
    if pool is None or host_indices is None or not keys:
        return None
    try:
        numbers = pool.pages.numbers(host_indices)
    except KvbmError as error:
        log.warning("pages are not moved: %s", error)
        return None
    return numbers if len(numbers) == len(keys) else None
