"""What KVBM costs the engine's scheduler thread: a long request arrives, and many long requests complete a block each.

The requests' block pool and block tables are vLLM's own; the manager is a real one in a process of its own. Processor
time is the scheduler thread's alone; wall time includes what it waits for (the kernel, and the manager where it must).

python -m benchmarks.scheduler_thread [--rounds 30] [--blocks 8192] [--requests 16] [--traces]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.layout import BlockLayout, Namespace
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.settings import Settings, process_environment
from kvbm.step_plan import StepPlan, StepReport
from kvbm.vllm_integration.scheduler_side import SchedulerSide

ENGINE = "bench-scheduler"
BLOCK_TOKENS = 16
ARRIVAL_BUDGET_MS = 1.0
STEP_BUDGET_MS = 0.5
LAYOUT = BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=4096)
NAMESPACE = Namespace(model="bench", fields=())


class Timed:
    """Processor and wall seconds of repeated calls."""

    def __init__(self) -> None:
        self.processor_s: list[float] = []
        self.wall_s: list[float] = []

    def call(self, *functions: Callable[[], Any]) -> Any:
        """The result of the last of these calls, which are timed together."""
        wall, processor = time.perf_counter(), time.thread_time()
        for function in functions:
            result = function()
        self.processor_s.append(time.thread_time() - processor)
        self.wall_s.append(time.perf_counter() - wall)
        return result

    def add(self, other: Timed) -> None:
        """Take over the times of another one."""
        self.processor_s += other.processor_s
        self.wall_s += other.wall_s

    def row(self, what: str, budget_ms: float | None) -> dict[str, Any]:
        """One line of the table, in ms."""
        return {
            "what": what,
            "budget_ms": budget_ms,
            "processor_ms": statistics.median(self.processor_s) * 1e3,
            "processor_max_ms": max(self.processor_s) * 1e3,
            "wall_ms": statistics.median(self.wall_s) * 1e3,
            "wall_max_ms": max(self.wall_s) * 1e3,
        }


class Engine:
    """The parts of vLLM's scheduler that KVBM's half reads, without a model."""

    def __init__(
        self, directory: str, host_blocks: int, device_blocks: int, blocks: int, traces: bool = False
    ) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=device_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        tokens_max = 2 * blocks * BLOCK_TOKENS
        self.cache = KVCacheManager(config, tokens_max, BLOCK_TOKENS, BLOCK_TOKENS)
        settings = Settings(
            host_blocks=host_blocks,
            runtime_dir=directory,
            onboard="always",
            onboard_mode="async",
            traces=traces,
        )
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id=ENGINE, kv_load_failure_policy="recompute"),
            model_config=SimpleNamespace(max_model_len=tokens_max, enable_sleep_mode=False),
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
            parallel_config=SimpleNamespace(world_size=1),
        )
        environment = process_environment()
        self.rank = _attached_rank(settings, environment)
        self.side = SchedulerSide(vllm_config, config, settings, environment)
        self.side.bind_block_pool(self.cache.block_pool)
        while not self.side.leader.ready:
            self.step({})
            time.sleep(0.01)

    def request(self, name: str, blocks: int, on_device: bool = False, lora_path: str = "") -> Any:
        """A request as it arrives; with `on_device` all its blocks are in vLLM's prefix cache."""
        hashes = chain(name, blocks)
        if on_device:
            index = self.cache.block_pool.cached_block_hash_to_block
            for block_hash, block in zip(hashes, self.cache.block_pool.blocks, strict=False):
                index.insert(make_block_hash_with_group_id(block_hash, 0), block)
        return SimpleNamespace(
            request_id=name,
            block_hashes=hashes,
            num_tokens=blocks * BLOCK_TOKENS + 1,
            num_computed_tokens=0,
            num_output_tokens=1,
            lora_request=SimpleNamespace(lora_path=lora_path, lora_int_id=1) if lora_path else None,
        )

    def run(self, request: Any, first_block: int) -> None:
        """The scheduler has given the request its device blocks."""
        blocks = self.cache.block_pool.blocks[first_block : first_block + len(request.block_hashes)]
        self.cache.coordinator.single_type_managers[0].req_to_blocks[request.request_id] = blocks

    def grow(self, request: Any, block: int) -> None:
        """The request's next step completes one block more."""
        request.num_computed_tokens = len(request.block_hashes) * BLOCK_TOKENS
        request.block_hashes.append(hashlib.sha256(request.block_hashes[-1]).digest())
        table = self.cache.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
        table.append(self.cache.block_pool.blocks[block])

    def output(self, scheduled: dict[str, int]) -> Any:
        """A step's scheduler output, as far as connectors read it."""
        from vllm.v1.core.sched.output import KVConnectorBlockState

        state = KVConnectorBlockState(set(scheduled), self.cache.get_block_ids, {})
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=None,
            kv_connector_block_state=state,
        )

    def step(self, scheduled: dict[str, int]) -> StepPlan:
        return self.side.step(self.output(scheduled))

    def report(self, plan: StepPlan) -> Any:
        """What the ranks say of a step in which every copy succeeded."""
        return StepReport(stored={store.store: (1, (), 1e-4) for store in plan.stores})

    def load(self, request: Any) -> None:
        """The request's load goes to the ranks, and has arrived."""
        (plan,) = self.step({}).loads
        assert len(plan.slots) == len(request.block_hashes)
        arrived = SimpleNamespace(finished_recving={request.request_id}, invalid_block_ids=None)
        self.side.updated(arrived, StepReport(loaded={request.request_id: 1e-3}))

    def settle(self) -> None:
        """Step on until every store is committed."""
        nothing = SimpleNamespace(finished_recving=None, invalid_block_ids=None)
        while len(self.side.leader.stores):
            self.side.updated(nothing, self.report(self.step({})))
            time.sleep(0.001)


def _attached_rank(settings: Settings, environment: Any) -> Channel:
    """The session of the engine's only rank, which copies nothing here."""
    address = ManagerAddress.of(settings, ENGINE)
    finder = ManagerFinder(address, settings, environment, time.monotonic)
    hello = Hello(version=PROTOCOL_VERSION, role="worker", engine=ENGINE, namespace=NAMESPACE, layout=LAYOUT)
    return finder.establish(hello, 60.0, time.sleep)[0]


def chain(name: str, blocks: int) -> list[bytes]:
    """Block hashes as vLLM has them: a chain of sha256."""
    hashes, parent = [], name.encode()
    for _ in range(blocks):
        parent = hashlib.sha256(parent).digest()
        hashes.append(parent)
    return hashes


def arrivals(
    engine: Engine, title: str, blocks: int, rounds: int, held: bool = False, **request_options: Any
) -> list[dict[str, Any]]:
    """Requests that come one at a time, are told what matches, and end; with `held` the manager has their blocks."""
    added, matched, allocated, finished = Timed(), Timed(), Timed(), Timed()
    for number in range(rounds):
        request = engine.request("held" if held else f"{title} {number}", blocks, **request_options)
        computed = blocks * BLOCK_TOKENS if request_options.get("on_device") else 0
        added.call(lambda request=request: engine.side.added(request))
        answer = matched.call(lambda r=request, c=computed: engine.side.matched(r, c))
        while answer[0] is None:
            time.sleep(0.001)
            answer = engine.side.matched(request, computed)
        assert answer[0] == (blocks * BLOCK_TOKENS if held else 0), answer
        if held:
            engine.run(request, 0)
            room = engine.cache.get_blocks(request.request_id)
            allocated.call(lambda r=request, b=room, n=answer[0]: engine.side.allocated(r, b, n))
            engine.load(request)
        else:
            allocated.call(lambda r=request: engine.side.allocated(r, None, 0))
        finished.call(lambda request=request: engine.side.finished(request))
        engine.step({})
        time.sleep(0.01)
    name = f"arrival, {blocks:,} blocks, {title}"
    return [
        added.row(name, ARRIVAL_BUDGET_MS),
        matched.row("  first question: how much matches", None),
        allocated.row("  room for it: its load is planned" if held else "  it is computed", None),
        finished.row("  its end", None),
    ]


def store_all(engine: Engine, request: Any, first_block: int) -> None:
    """The request runs and all its blocks reach the manager."""
    engine.side.added(request)
    engine.run(request, first_block)
    engine.step({request.request_id: len(request.block_hashes) * BLOCK_TOKENS})
    engine.settle()


def steps(engine: Engine, blocks: int, requests: int, rounds: int) -> list[dict[str, Any]]:
    """Steps in which all of the running requests complete a block."""
    running = [engine.request(f"running {number}", blocks) for number in range(requests)]
    first = 0
    for request in running:
        store_all(engine, request, first)
        first += blocks
    asking, planning, committing, quiet = Timed(), Timed(), Timed(), Timed()
    nothing = SimpleNamespace(finished_recving=None, invalid_block_ids=None)
    for _ in range(rounds):
        for number, request in enumerate(running):
            engine.grow(request, first + number)
        first += requests
        scheduled = {request.request_id: BLOCK_TOKENS for request in running}
        output = engine.output(scheduled)
        asking.call(lambda output=output: engine.side.step(output))
        engine.side.updated(nothing, None)
        for request in running:
            request.num_computed_tokens += BLOCK_TOKENS
        time.sleep(0.02)
        output = engine.output({request.request_id: 1 for request in running})
        whole = Timed()
        plan = whole.call(lambda output=output: engine.side.step(output))
        report = engine.report(plan)
        if len(plan.stores) < requests:  # the manager was slow: not what is measured
            engine.side.updated(nothing, report)
            engine.settle()
            continue
        planning.add(whole)
        committing.call(lambda report=report: engine.side.updated(nothing, report))
        output = engine.output({request.request_id: 1 for request in running})
        quiet.call(lambda output=output: engine.side.step(output))
        engine.side.updated(nothing, None)
        time.sleep(0.005)
    name = f"step, {requests} requests of {blocks:,} blocks complete a block each"
    return [
        asking.row(name, STEP_BUDGET_MS),
        planning.row("  the next step: their copies are planned", STEP_BUDGET_MS),
        committing.row("  the ranks report them", STEP_BUDGET_MS),
        quiet.row("  a step in which none completes a block", STEP_BUDGET_MS),
    ]


def write_adapter(directory: Path) -> str:
    """A LoRA adapter's directory, older than the engine as far as anybody can tell."""
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(os.urandom(1 << 20))
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return str(directory)


def rows(blocks: int, requests: int, rounds: int, traces: bool = False) -> list[dict[str, Any]]:
    """All measurements in one engine: what, budget, medians and maxima in ms."""
    chains = (requests + 4) * (blocks + rounds)
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory:
        os.chmod(directory, 0o700)
        adapter = write_adapter(Path(directory) / "adapter")
        engine = Engine(directory, chains, chains, blocks, traces)
        found = arrivals(engine, "nothing found", blocks, rounds)
        found += arrivals(engine, "all on the device", blocks, rounds, on_device=True)
        held = engine.request("held", blocks)
        store_all(engine, held, 0)
        engine.side.finished(held)
        found += arrivals(engine, "all in host memory", blocks, rounds, held=True)
        found += steps(engine, blocks, requests, rounds)
        found += arrivals(engine, "with an adapter", blocks, rounds, lora_path=adapter)
        engine.side.reset()
        found += arrivals(engine, "after a reset", blocks, rounds)
        engine.side.close()
        engine.rank.close()
    return found


def render(found: list[dict[str, Any]]) -> Table:
    """A ratio of at most 1 is within the budget."""
    columns = ("what", "budget ms", "processor ms", "max", "ratio", "wall ms", "max wall")
    table = plain_table(columns, words={"what"}, title="The scheduler's thread")
    for row in found:
        budget = row["budget_ms"]
        table.add_row(
            row["what"],
            f"{budget:g}" if budget else "",
            f"{row['processor_ms']:.3f}",
            f"{row['processor_max_ms']:.3f}",
            f"{row['processor_ms'] / budget:.2f}" if budget else "",
            f"{row['wall_ms']:.3f}",
            f"{row['wall_max_ms']:.3f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8192, help="of each request")
    parser.add_argument("--requests", type=int, default=16, help="that run at once")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--traces", action="store_true", help="send a trace of each request")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found = rows(options.blocks, options.requests, options.rounds, options.traces)
    save_json(found, options.output / "scheduler-thread.json")
    console().print(render(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
