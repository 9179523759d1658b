"""The ranks of the double: the first in this process, the others in processes of their own."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kvbm import engine_start
from rigs.trtllm import package
from rigs.trtllm.model import BLOCK_TOKENS, LAYERS, ToyModel

DEADLINE_S = 60.0


class Work(NamedTuple):
    """One request in an iteration: compute tokens `[start, end)`; `shaped` as in the model."""

    table: list[int]
    tokens: list[int]
    start: int
    end: int
    shaped: list[int]


class Spec(NamedTuple):
    """How an engine is made: the same for all its ranks."""

    model: str
    version: str = package.NEWEST
    device_blocks: int = 16
    ranks: int = 1
    latent: bool = False
    partial_reuse: bool = False
    layout_groups: int = 0
    max_seq_len: int = 256


def llm_args(spec: Spec, rank: int) -> Any:
    """The engine's arguments as a rank has them."""
    mapping = SimpleNamespace(
        rank=rank,
        world_size=spec.ranks,
        tp_size=spec.ranks,
        tp_rank=rank,
        pp_size=1,
        pp_rank=0,
        gpus_per_node=8,
    )
    return SimpleNamespace(
        model=spec.model,
        parallel_config=SimpleNamespace(to_mapping=lambda: mapping),
        kv_cache_config=SimpleNamespace(
            tokens_per_block=BLOCK_TOKENS,
            enable_partial_reuse=spec.partial_reuse,
            dtype="auto",
            host_cache_size=0,
        ),
        max_seq_len=spec.max_seq_len,
        dtype="int64",
    )


def connector_module(version: str) -> Any:
    """Our connector, over the package of that release."""
    package.remove()
    package.install(version)
    return importlib.import_module("kvbm.trtllm_integration.connector")


class Rank:
    """One rank: its cache, its connector, and the calls of an iteration."""

    def __init__(self, spec: Spec, rank: int, module: Any) -> None:
        self.model = ToyModel(spec.device_blocks, rank, spec.latent)
        self.connector = (
            module.DynamoKVBMConnectorWorker(llm_args(spec, rank)) if module is not None else None
        )
        self._ended = None
        if self.connector is None:
            return
        self._ended = self.connector.register_forward_pass_callable()
        if spec.layout_groups:
            self.connector.register_kv_cache_layout(layout_of(self.model, spec.layout_groups))
        else:
            self.connector.register_kv_caches(self.model.cache)

    def step(self, metadata: object, works: list[Work], graph: bool) -> list[int]:
        """One iteration up to the end of its forward pass; the next token of each request. A `graph` calls no hooks."""
        if self.connector is not None:
            self.connector.bind_connector_meta(metadata)
            self.connector.start_load_kv(None)
        for work in works:
            wrong = self.model.wrong(work.table, work.tokens, work.start, work.shaped)
            assert wrong < 0, f"wrong KV at position {wrong} of {work.start}"
        for layer in range(LAYERS) if self.connector is not None and not graph else ():
            self.connector.wait_for_layer_load(layer, None)
        for work in works:
            self.model.compute(work.table, work.tokens, work.start, work.end, work.shaped)
        for layer in range(LAYERS) if self.connector is not None and not graph else ():
            self.connector.save_kv_layer(layer, None)
        if self._ended is not None:
            self._ended()
        if self.connector is not None:
            self.connector.wait_for_save(None)
        return [self.model.next_token(work.table, work.tokens[: work.end]) for work in works]

    def finished(self, ended: list[int]) -> list[int]:
        if self.connector is None:
            return ended
        saved, loaded = self.connector.get_finished(ended, [])
        assert loaded == []
        return list(saved)

    def stores_here(self) -> bool:
        assert self.connector is not None
        return bool(self.connector._side.worker._stores_here)

    def copy_block(self, source: int, target: int) -> None:
        self.model.cache[target] = self.model.cache[source]

    def close(self) -> None:
        if self.connector is not None:
            self.connector.close()


def layout_of(model: ToyModel, groups: int) -> Any:
    """The cache as the second manager describes it: each layer's K and V as a region, page slots interleaved."""
    blocks, page = model.cache.shape[0], model.cache[0].numel() * 8
    size = page // (LAYERS * model.planes)

    def region(layer: int, plane: int) -> Any:
        offset = (layer * model.planes + plane) * size
        storage = model.cache.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (blocks, size), (page, 1))
        return SimpleNamespace(
            size=size,
            stride=page,
            num_slots=blocks,
            buffers=(SimpleNamespace(layer_id=layer, role=("key", "value")[plane], expansion=1),),
            as_tensor=lambda: raw,
        )

    regions = tuple(region(layer, plane) for layer in range(LAYERS) for plane in range(model.planes))
    group = SimpleNamespace(
        layer_group_id=0,
        layer_ids=tuple(range(LAYERS)),
        window_size=None,
        regions=regions,
        replicated_regions=(),
    )
    return SimpleNamespace(
        tokens_per_block=BLOCK_TOKENS, groups=(group,) * groups, gpu_pool_mapping_bytes=None
    )


class RankProcess:
    """A rank in a process of its own. A call is sent with `ask` and its answer taken with `answer`."""

    def __init__(self, spec: Spec, rank: int, connected: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, spec, rank, connected), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *arguments: object) -> None:
        self._pipe.send((name, arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(DEADLINE_S), "a rank does not answer"
        error, result = self._pipe.recv()
        assert error is None, error
        return result

    def close(self) -> None:
        self._pipe.close()
        self.process.join(10.0)


def _serve(pipe: Connection, spec: Spec, number: int, connected: bool) -> None:
    engine_start.engine_start_s = lambda: time.time() + 60.0  # as in `house.House`
    rank = Rank(spec, number, connector_module(spec.version) if connected else None)
    pipe.send((None, "ready"))
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((None, getattr(rank, name)(*arguments)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    rank.close()
    os._exit(0)
