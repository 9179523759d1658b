"""One rank's way to its manager: settings, names, weights, and who keeps what. SGLang hands none of it to a backend."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbm.client.mirror import Mirror
from kvbm.errors import KvbmError, ManagerUntrusted
from kvbm.layout import BlockLayout, Namespace
from kvbm.library import BlockManager
from kvbm.library.attachment import Attachment
from kvbm.observe.log import configure
from kvbm.settings import (
    Settings,
    available_memory_bytes,
    load_settings,
    process_environment,
    shared_manager_notices,
)
from kvbm.sglang_integration.host_pages import Pages
from kvbm.sglang_integration.keeper import Keeper
from kvbm.sglang_integration.namespace import ENGINE, adapters_digest, describe_pages, page_namespace
from kvbm.sglang_integration.pages_kept import PagesKept
from kvbm.sglang_integration.weights import (
    WATCH,
    Meeting,
    RunningWeights,
    WeightsWatch,
    digest_of,
    model_runners,
    watch_weights,
)

log = logging.getLogger("kvbm.sglang")

KV_POOL = "kv"
REPLY_S = 1.0
SHARED_JOIN_S = 5.0
"""How long the start waits for a shared manager; without it the engine serves, and joins it later."""
REJOIN_S = 0.05
WEIGHTS_S = 2.0
"""How long the start waits for the digest of the weights; it goes on in the background, and until it is made nothing is
found or kept."""


@dataclass
class Deployment:
    """See the module. `rank` is this rank's name among those of the deployment, `shape` how the model is divided."""

    name: str
    rank: str
    data_parallel_rank: int
    shape: str
    settings: Settings
    environment: dict[str, str]
    runners: list[Any]
    weights: RunningWeights
    watch: WeightsWatch
    _pools: int = field(default=1, init=False)

    @classmethod
    def of_process(
        cls, name: str, rank: str, data_parallel_rank: int, shape: str, extra_config: object = None
    ) -> Deployment:
        """Of the process that this is called in, whose model is loaded. Raises SettingsError."""
        environment = dict(process_environment())
        loaded = load_settings(environment, extra_config=extra_config, memory_bytes=available_memory_bytes())
        configure(loaded.settings.log_level)
        shared = shared_manager_notices(loaded.settings, loaded.origins)
        for line in (*loaded.warnings, *(shared if loaded.settings.manager else loaded.notices)):
            log.warning("%s", line)
        watch_weights()
        runners = model_runners()
        if not runners:
            raise KvbmError(
                "KVBM found no model in this process: SGLang is not as in the versions that were tested"
            )
        memo = Path(loaded.settings.runtime_dir) / "weights.json"
        extras = adapters_digest(runners[0].server_args, memo)
        weights = RunningWeights(
            name, WATCH, functools.partial(_digest, runners), Meeting.of_process(), extras
        )
        return cls(
            name, rank, data_parallel_rank, shape, loaded.settings, environment, runners, weights, WATCH
        )

    def keeper(
        self, on_event: Callable[[], None], descriptors: Callable[[], Iterable[int]] = tuple
    ) -> Keeper:
        """The thread that owns what is at the manager."""
        return Keeper(f"kvbm-{self.name}", on_event, descriptors)

    def pages_kept(
        self,
        pool: str,
        sglang_pool: Any,
        pages: Pages,
        place: str,
        page_tokens: int = 0,
        mirrored: bool = True,
    ) -> PagesKept:
        """One pool's pages. `place` tells this rank's bytes from those of other ranks, where they differ.

        `mirrored`: the pool's mirror is kept up to date.
        """
        description = describe_pages(sglang_pool, pages.cache)
        page_tokens = page_tokens or int(getattr(sglang_pool, "page_size", 1))
        namespace = page_namespace(self.runners[0], pool, description, page_tokens, self.shape)
        layout = BlockLayout(block_tokens=page_tokens, shard_bytes=pages.page_bytes)
        engine = f"{ENGINE}-{os.getpid()}-{os.urandom(4).hex()}-{self.name}-{self.rank}-{pool}"
        mirror = Mirror()
        return PagesKept(
            namespace,
            pages,
            _Joining(self, engine, layout, namespace, mirror if mirrored else None),
            functools.partial(self._shapes, place, True),
            functools.partial(self._shapes, place, False),
            lambda: self.weights.coming,
            time.monotonic,
            mirror,
            chained=pool == KV_POOL,
        )

    def wait_for_weights(self) -> None:
        """Wait a little for the digest of the weights, so that small models keep their first pages too."""
        self.weights.wait(WEIGHTS_S)

    def expect_pools(self, count: int, stages: int) -> None:
        """So many pools will join, on each of so many stages of a pipeline: each has a namespace, and takes an equal
        share of our own manager's memory."""
        self._pools = max(1, count) * stages

    def begin(self, keeper: Keeper, pool: PagesKept) -> None:
        """Join the manager at the engine's start. Raises KvbmError where our own cannot serve as it was set up."""
        failed: list[KvbmError] = []

        def join() -> None:
            try:
                pool.join()
            except KvbmError as error:
                failed.append(error)

        private = not self.settings.manager
        keeper.call(join, None, self.settings.init_timeout_s if private else SHARED_JOIN_S + REPLY_S)
        for error in failed:
            if private and not isinstance(error, ManagerUntrusted):
                raise error
            log.warning("%s; serving without a KV cache until it is there", error)

    def attachment(self, engine: str) -> Attachment:
        """The way to the manager. All ranks of one launch share a private one: they are children of one process."""
        settings = self.settings
        return Attachment.of_engine(
            settings,
            self.environment,
            f"{ENGINE}-{_launch(self.runners[0].server_args)}",
            engine,
            self.data_parallel_rank,
            namespaces=self._pools,
            kind=ENGINE,
        )

    def _shapes(self, place: str, look: bool) -> bytes | None:
        """What selects the key space of this rank's pages: the weights, and whose shard they are. With `look` the other
        ranks are asked for their part, over the network."""
        weights = self.weights.look() if look else self.weights.identity()
        return weights + place.encode() if weights is not None else None


class _Joining:
    """Makes the block manager of one pool: patiently at the engine's start, briefly after that."""

    def __init__(
        self,
        deployment: Deployment,
        engine: str,
        layout: BlockLayout,
        namespace: Namespace,
        mirror: Mirror | None,
    ) -> None:
        self._deployment, self._engine, self._mirror = deployment, engine, mirror
        self._layout, self._namespace = layout, namespace
        self._tries = 0

    def __call__(self) -> BlockManager:
        settings = self._deployment.settings
        first, self._tries = self._tries == 0, self._tries + 1
        timeout_s = float(settings.init_timeout_s) if not settings.manager else SHARED_JOIN_S
        # Two sessions have the name: a number makes it another engine's than that of a try that is still going.
        attachment = self._deployment.attachment(f"{self._engine}-{self._tries}")
        return BlockManager.attach(
            attachment,
            self._layout,
            self._namespace,
            timeout_s if first else REJOIN_S,
            REPLY_S,
            mirror=self._mirror,
        )


def _digest(runners: list[Any]) -> bytes:
    return digest_of(runner.model for runner in runners)


def _launch(server_args: Any) -> str:
    """Names the launch that this rank belongs to: the process that all its ranks are children of, and what it serves
    where, as a program may launch several."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    served = [
        str(getattr(server_args, name, "")) for name in ("model_path", "host", "port", "dist_init_addr")
    ]
    return hashlib.sha256("\0".join((str(parent), started, *served)).encode()).hexdigest()[:12]
