"""A small paged-attention serving loop in plain torch that keeps its KV with KVBM: how to embed it in a runtime.

Run it: `python examples/mini_engine.py` makes up a small model and serves conversations with a device cache that is too
small for them. Token ids in, token ids out, on CPU or CUDA. `mini_model.py` has the parts that every runtime has: the
forward pass and the device's blocks. The calls of KVBM are marked (1) to (5), as in docs/guides/embedding.md.

**The same bits in every run.** Matrix products add up in an order that depends on their shapes: a token
computed alone differs in its last bits from the same token computed among others, and now and then an argmax tips.
So by default (`exact`) everything is computed one block of one sequence at a time: a token always lies in row
`position % block_tokens` of a matrix of `block_tokens` rows, the rest padding, and attends to whole blocks with what
lies ahead masked. Equal shapes give equal bits: a token's KV is the same prefilled, decoded or loaded, whatever ran
beside it. `exact=False` computes long chunks and the whole batch at once, as runtimes do.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

import kvbm

sys.path.insert(0, str(Path(__file__).parent))  # so that this file can also be imported by its path
from mini_model import Config, DeviceBlocks, Model, Step

PREFILL_CHUNK_TOKENS = 512  # computed at once where `exact` is off
OFFLOAD_BLOCKS_PER_STEP = 16  # of each sequence: bounds what a long prompt adds to the steps after it
# Tokens in the conversations that are made up. Answers are short: where `exact`, one token costs as much as a block.
SYSTEM, QUESTION, ANSWER = 128, (120, 200), 6
MADE_UP = Config(layers=3, hidden=384, intermediate=1024, heads=6, kv_heads=2, head_dim=64, qk_norm=True)
COUNTED = (
    "requests",
    "prompt tokens",
    "prefill tokens computed",
    "blocks found on device",
    "blocks onboarded",
)


@dataclass(eq=False)
class Request:
    """A prompt and, as they come, the tokens after it: `max_tokens` of them, or fewer where one is in `stop`."""

    prompt: Sequence[int]
    max_tokens: int
    stop: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)  # prompt and output; all but the last have KV
    blocks: list[int] = field(default_factory=list)  # device blocks, in order
    published: int = 0  # leading blocks that the device's prefix cache knows
    offloaded: int = 0  # leading blocks that KVBM was given
    chain: kvbm.Chain = field(init=False)  # the keys of the full blocks: each is hashed once

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]


class Engine:
    """Serves requests greedily: `prefill` one at a time, `decode_step` all that run together. One thread owns it.

    Set `manager` to a `kvbm.BlockManager(engine.layout, …, namespace=engine.namespace)` to keep blocks with KVBM.
    """

    def __init__(self, model: Model, device_blocks: int, exact: bool = True, block_tokens: int = 16) -> None:
        self.model, self.block_tokens, self.exact = model, block_tokens, exact
        self.manager: kvbm.BlockManager | None = None
        self.running: list[Request] = []
        self.counts: Counter[str] = Counter()  # see COUNTED
        self.prefill_s = 0.0
        self._device = model.embedding.device
        self._blocks = DeviceBlocks(device_blocks)
        # Blocks first: all layers of a block lie together, and one long copy moves it. Zeros, because what is masked
        # is still multiplied (by 0), and fresh memory may hold NaN.
        c, dtype = model.config, model.embedding.dtype
        shape = (c.layers, 2, block_tokens, c.kv_heads, c.head_dim)
        self._kv = torch.zeros(device_blocks, *shape, dtype=dtype, device=self._device)
        self.kv_cache = {"kv": self._kv}
        # (1) What a block is, and everything that gives its bytes their meaning, the weights' content first of all.
        self.layout = kvbm.BlockLayout(block_tokens=block_tokens, shard_bytes=self._kv[0].nbytes)
        self.namespace = kvbm.Namespace(
            model="mini-engine",
            fields=(("weights", model.identity), ("kv", f"{dtype} {shape} on {self._device.type}")),
        )
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @classmethod
    def random(cls, config: Config, device: str, dtype: torch.dtype, seed: int = 0, **options: Any) -> Engine:
        """An engine with random weights, made on the device; `options` as for `Engine`."""
        return cls(Model.random(config, device, dtype, seed), **options)

    def fits(self, request: Request) -> bool:
        """Whether there is room for it now, to its last token. Raises kvbm.SettingsError when there never will be."""
        needed = self._blocks_for(request)
        if needed > self._blocks.count:
            raise kvbm.SettingsError("device_blocks", self._blocks.count, f"this request needs {needed}")
        return needed <= self._blocks.available

    def prefill(self, request: Request) -> None:
        """Take the request in: find or load its prefix, compute the rest of its prompt and its first token."""
        begun_s, prompt = time.perf_counter(), list(request.prompt)
        # The last token is always computed, for its logits, and so is the block that it lies in.
        request.tokens, request.chain = prompt, kvbm.Chain(self.layout, self.namespace, prompt[:-1])
        held, arrived = self._blocks.find(request.chain.keys), 0
        own = self._blocks.allocate(self._blocks_for(request) - len(held))
        request.blocks = held + own
        if self.manager is not None:
            # (2) Blocks that are found after those of the device are not evicted while the `with` block runs.
            with self.manager.match(request.chain, skip=len(held)) as hit:
                # (3) A block that does not arrive (its check on disk failed) is computed below.
                arrived = hit.onboard(self.kv_cache, own)
        computed = (len(held) + arrived) * self.block_tokens
        counts = (1, len(prompt), len(prompt) - computed, len(held), arrived)
        self.counts.update(dict(zip(COUNTED, counts, strict=True)))
        chunk = self.block_tokens if self.exact else PREFILL_CHUNK_TOKENS
        with torch.cuda.stream(self._stream):
            for start in range(computed, len(prompt), chunk):
                logits = self._compute([request], [start], min(chunk, len(prompt) - start))
            token = int(logits[0].argmax())
        self.prefill_s += time.perf_counter() - begun_s
        self.running.append(request)
        self._append(request, token)

    def decode_step(self) -> None:
        """One more token for every running request."""
        with torch.cuda.stream(self._stream):
            batches = [[request] for request in self.running] if self.exact else [self.running]
            logits = [self._compute(batch, [len(r.tokens) - 1 for r in batch], 1) for batch in batches]
            tokens = torch.cat(logits).argmax(-1)
        # (4) Offload what earlier steps filled while this one computes. KVBM copies after the work on the current
        # stream, and that is not the engine's: those blocks are complete, since their step's tokens were read.
        for request in self.running:
            self._offload(request, OFFLOAD_BLOCKS_PER_STEP)
        with torch.cuda.stream(self._stream):
            for request, token in zip(list(self.running), tokens.tolist(), strict=True):
                self._append(request, token)

    def serve(self, requests: Iterable[Request], batch: int = 4) -> None:
        """Run requests to their ends, at most `batch` at a time, in order of arrival."""
        waiting = deque(requests)
        while waiting or self.running:
            while waiting and len(self.running) < batch and self.fits(waiting[0]):
                self.prefill(waiting.popleft())
            if self.running:
                self.decode_step()

    def _append(self, request: Request, token: int) -> None:
        """A new token: publish the blocks that are full now, and end the request if it was the last one."""
        request.chain.append(request.tokens[-1])  # it has KV by now
        request.tokens.append(token)
        full = request.chain.blocks
        if full > request.published:
            keys = request.chain.keys[request.published :]
            self._blocks.publish(keys, request.blocks[request.published : full])
            request.published = full
        if token in request.stop or len(request.output) >= request.max_tokens:
            # The last moment: blocks that are released may be overwritten.
            self._offload(request, full)
            self._blocks.release(request.blocks)
            self.running.remove(request)

    def _offload(self, request: Request, blocks_max: int) -> None:
        """Give KVBM up to `blocks_max` more full blocks. It copies only blocks that it does not hold."""
        end = min(request.chain.blocks, request.offloaded + blocks_max)
        if self.manager is not None and end > request.offloaded:
            self.manager.offload(request.chain, self.kv_cache, request.blocks[:end])
            request.offloaded = end

    def _compute(self, batch: Sequence[Request], starts: Sequence[int], count: int) -> torch.Tensor:
        """Compute `count` tokens of each request, from `starts` on; logits `[len(batch), vocab]` after the last."""
        size = self.block_tokens
        row_count = size if self.exact else count
        ids, positions, blocks, offsets = [], [], [], []
        rows: list[int] = []
        for i, (request, start) in enumerate(zip(batch, starts, strict=True)):
            before = start % size if self.exact else 0  # rows of padding
            ids.append([0] * row_count)
            ids[i][before : before + count] = request.tokens[start : start + count]
            positions.append(list(range(start - before, start - before + row_count)))
            rows += range(i * row_count + before, i * row_count + before + count)
            blocks += [request.blocks[position // size] for position in range(start, start + count)]
            offsets += [position % size for position in range(start, start + count)]
        width = -(-(max(starts) + count) // size)
        tables = [(request.blocks[:width] + [0] * width)[:width] for request in batch]
        values = (ids, positions, tables, rows, blocks, offsets, rows[count - 1 :: count])
        step = Step(*(torch.tensor(value, device=self._device) for value in values))
        return self.model.forward(self._kv, step)

    def _blocks_for(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.max_tokens) // self.block_tokens)


class Run(NamedTuple):
    """The cost of serving the conversations, and all tokens that were generated."""

    title: str
    counts: Counter[str]
    prefill_s: float
    seconds: float
    talks: list[list[int]]


def converse(engine: Engine, conversations: int, turns: int, batch: int, seed: int) -> list[list[int]]:
    """Made-up conversations that share a system prompt, turn by turn; returns questions and answers of each."""
    rng, words = random.Random(seed), range(engine.model.config.vocab)
    talks = [rng.choices(words, k=SYSTEM)] * conversations
    for _ in range(turns):
        requests = [Request(talk + rng.choices(words, k=rng.randint(*QUESTION)), ANSWER) for talk in talks]
        engine.serve(requests, batch)
        talks = [request.tokens for request in requests]
    return talks


def compare(
    model: Model,
    conversations: int = 5,
    turns: int = 4,
    batch: int = 2,
    device_blocks: int = 0,
    exact: bool = True,
    seed: int = 0,
    **tiers: Any,
) -> list[Run]:
    """The same conversations without eviction, with it, with it and KVBM. `tiers`: see `kvbm.BlockManager`."""
    most = -(-(SYSTEM + turns * (QUESTION[1] + ANSWER)) // 16)
    few = device_blocks or batch * most
    runs = []
    for title, blocks in (("no eviction", conversations * most), ("eviction", few), ("eviction, KVBM", few)):
        engine = Engine(model, blocks, exact)
        with ExitStack() as stack:
            if "KVBM" in title:
                manager = kvbm.BlockManager(engine.layout, namespace=engine.namespace, **tiers)
                # (5) Closing writes to disk what waits for it; a later manager of the same namespace finds it.
                engine.manager = stack.enter_context(manager)
            begun_s = time.perf_counter()
            talks = converse(engine, conversations, turns, batch, seed)
            taken_s = time.perf_counter() - begun_s
            runs.append(Run(title, engine.counts, engine.prefill_s, taken_s, talks))
    return runs


def main(
    model: Annotated[Path | None, typer.Argument(help="Llama or Qwen3 directory; none: one made up")] = None,
    device: Annotated[str, typer.Option(help="or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, …, or checkpoint: its own")] = "float32",
    conversations: Annotated[int, typer.Option(min=1)] = 5,
    turns: Annotated[int, typer.Option(min=1, help="questions in each conversation")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="requests that run together")] = 2,
    device_blocks: Annotated[int, typer.Option(help="of the small device cache; 0: what a batch needs")] = 0,
    host: Annotated[str, typer.Option(help="KVBM's host memory")] = "64MB",
    disk: Annotated[str, typer.Option(help="size of KVBM's disk tier, as in 1GB; by default none")] = "",
    disk_dir: Annotated[str, typer.Option(help="where the disk tier lies, and is found again")] = "/tmp/",
    exact: Annotated[bool, typer.Option(help="outputs depend on neither batch nor chunks")] = True,
    seed: Annotated[int, typer.Option(help="of the conversations")] = 0,
) -> None:
    """Serve conversations three times: without eviction, with it, with it and KVBM. Exits with 1 if outputs differ."""
    kind = None if dtype == "checkpoint" else getattr(torch, dtype, dtype)
    if not isinstance(kind, torch.dtype | None):
        raise kvbm.SettingsError("dtype", dtype, "float32, bfloat16, float16 or checkpoint")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise kvbm.SettingsError("device", device, "torch finds no CUDA device here; accepted: cpu")
    if model is None:
        torch.set_num_threads(1)  # its matrices are too small to be shared out
        loaded = Model.random(MADE_UP, device, kind or torch.float32)
    else:
        loaded = Model.load(model, device, kind)
    converse(Engine(loaded, 64, exact), 1, 1, 1, seed)  # what a device does once, before the clock starts
    tiers = {"host": host, "disk": disk or None, "disk_dir": disk_dir}
    runs = compare(loaded, conversations, turns, batch, device_blocks, exact, seed, **tiers)
    equal = [run.talks == runs[0].talks for run in runs]
    table = Table("", *(Column(run.title, justify="right") for run in runs))
    for name in COUNTED:
        table.add_row(name, *(f"{run.counts[name]:,}" for run in runs))
    table.add_row("seconds of prefill", *(f"{run.prefill_s:.1f}" for run in runs))
    table.add_row("seconds in all", *(f"{run.seconds:.1f}" for run in runs))
    table.add_row("outputs equal", *("yes" if same else "NO" for same in equal))
    Console().print(table)
    raise typer.Exit(not all(equal))


if __name__ == "__main__":
    try:
        typer.run(main)
    except kvbm.KvbmError as error:
        sys.exit(f"mini_engine: {error}")
