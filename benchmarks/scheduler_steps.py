"""What a KV connector costs vLLM's own scheduler with many requests: KVBM and vLLM's own offloading, beside none.

256 requests run and 1,744 wait. The scheduler, its requests and its block pool are vLLM's; no model runs: each request
gets one token a step, and every copy ends within its step. Times are processor time of the scheduler's thread. The
three schedulers take their steps in turn, in one process; KVBM's manager is a real one in a process of its own.

python -m benchmarks.scheduler_steps [--running 256] [--waiting 1744] [--steps 160]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.peers import vllm_native
from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.layout import BlockLayout, Namespace
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.settings import load_settings, process_environment
from kvbm.step_plan import StepReport
from kvbm.testing.tiny_model import make_model
from kvbm.vllm_integration.connector.dynamo_connector import DynamoConnectorReport

ALONE, OURS, VLLM = "no connector", "KVBM", "vLLM's own offloading"
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 32
STEP_TOKENS_MAX = 8192
SPEC = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
WAIT_S_MAX = 60.0
ASKED_ROUNDS = 10
COMPUTING_S = 2.0
ENGINES = (f"bench-steps-{number}" for number in count())
WARM_STEPS = 40
COLUMNS = ALONE, OURS, VLLM
ARRIVES, STEP = "a request arrives", "a step"
END, WAITS = (
    "all end, and the step after",
    "question about one that waits",
)
BUDGETS_MS = {STEP: 0.5, END: 10.0, WAITS: 1e-3}
"""What KVBM may add to vLLM alone."""
Found = dict[str, dict[str, list[float]]]


class Sizes:
    """How many requests there are, and how many blocks they take."""

    def __init__(self, running: int, waiting: int, steps: int) -> None:
        self.running, self.waiting, self.steps = running, waiting, steps
        self.request_blocks = PROMPT_BLOCKS + 3 + -(-2 * steps // BLOCK_TOKENS)
        self.device_blocks = 2 * running * self.request_blocks
        self.host_blocks = 4 * self.device_blocks


class Engine:
    """vLLM's scheduler with one connector, or none."""

    def __init__(self, column: str, directory: Path, sizes: Sizes) -> None:
        self.column, self._sizes, self._name = column, sizes, next(ENGINES)
        self._ours = {
            "host_blocks": sizes.host_blocks,
            "runtime_dir": str(directory),
            "onboard": "always",
            "onboard_mode": "async",
        }
        config = EngineArgs(
            model=str(make_model(directory / "model")),
            max_model_len=sizes.request_blocks * BLOCK_TOKENS,
            max_num_seqs=sizes.running,
            max_num_batched_tokens=STEP_TOKENS_MAX,
            block_size=BLOCK_TOKENS,
            async_scheduling=False,
            kv_transfer_config=self._transfer_config(),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = sizes.device_blocks

        cache = KVCacheConfig(sizes.device_blocks, [], [KVCacheGroupSpec(["layer"], SPEC)])
        self._rank = self._attached_rank() if column == OURS else None
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK_TOKENS)
        self._numbers = count()
        self._stores: list[int] = []
        self._loads: dict[Any, str] = {}
        self._computing_s = 0.0
        self.copies_held = False
        """No copy ends."""
        self.processor_s = 0.0
        """Of the latest step, or arrival."""
        if column == OURS:
            wait_until(self._ready)

    def _transfer_config(self) -> KVTransferConfig | None:
        if self.column == VLLM:
            host_bytes = self._sizes.host_blocks * SPEC.page_size_bytes
            return KVTransferConfig(**vllm_native.host_config(host_bytes))
        if self.column == ALONE:
            return None
        return KVTransferConfig(
            kv_connector="DynamoConnector",
            kv_role="kv_both",
            kv_connector_module_path="kvbm.vllm_integration.connector",
            kv_load_failure_policy="recompute",
            engine_id=self._name,
            kv_connector_extra_config={"kvbm": self._ours},
        )

    def _attached_rank(self) -> Channel:
        """The session of the engine's only rank, which copies nothing here."""
        environment = process_environment()
        settings = load_settings(environment, extra_config=self._ours).settings
        finder = ManagerFinder(ManagerAddress.of(settings, self._name), settings, environment, time.monotonic)
        layout = BlockLayout(block_tokens=BLOCK_TOKENS, shard_bytes=4096)
        namespace = Namespace(model="bench", fields=())
        hello = Hello(
            version=PROTOCOL_VERSION, role="worker", engine=self._name, namespace=namespace, layout=layout
        )
        return finder.establish(hello, WAIT_S_MAX, time.sleep)[0]

    def _ready(self) -> bool:
        self.step()
        return bool(self.scheduler.connector._scheduler.side.leader.ready)

    def add(self, prompt: list[int]) -> Request:
        """A request arrives."""
        sampling = SamplingParams(max_tokens=self._sizes.request_blocks * BLOCK_TOKENS, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=1)
        request = Request(str(next(self._numbers)), prompt, sampling, None, block_hasher=self._hasher)
        began = time.thread_time()
        self.scheduler.add_request(request)
        self.processor_s = time.thread_time() - began
        return request

    def step(self) -> None:
        """One step: scheduled, and its tokens and copies taken in."""
        began = time.thread_time()
        output = self.scheduler.schedule()
        middle = time.thread_time()
        time.sleep(self._computing_s)
        names = list(output.num_scheduled_tokens)
        ended = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._tokens(name) for name in names],
            kv_connector_output=self._copied(output.kv_connector_metadata),
        )
        resumed = time.thread_time()
        self.scheduler.update_from_output(output, ended)
        self.processor_s = time.thread_time() - resumed + middle - began

    def _tokens(self, name: str) -> list[int]:
        """A token of a request whose prompt is computed; none otherwise."""
        request = self.scheduler.requests[name]
        return [2] if request.num_computed_tokens >= request.num_tokens else []

    def _copied(self, metadata: Any) -> KVConnectorOutput | None:
        """What the ranks report: every copy has ended, unless they are held."""
        if self.column == ALONE:
            return None
        if self.column == OURS:
            self._stores += [store.store for store in metadata.plan.stores]
            self._loads |= {load.request: load.request for load in metadata.plan.loads}
        else:
            self._stores += metadata.store_jobs
            self._loads |= {number: job.req_id for number, job in metadata.load_jobs.items()}
        if self.copies_held:
            return KVConnectorOutput()
        stores, self._stores = self._stores, []
        loads, self._loads = self._loads, {}
        done: Any = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys((*stores, *loads), 1))
        if self.column == OURS:
            done = DynamoConnectorReport(
                StepReport(stored=dict.fromkeys(stores, (1, (), 1e-4)), loaded=dict.fromkeys(loads, 1e-3))
            )
        return KVConnectorOutput(finished_recving=set(loads.values()), kv_connector_worker_meta=done)

    def fill(self) -> None:
        """Step until as many requests decode as may run, or as there are."""
        running = self.scheduler.running

        def is_filled() -> bool:
            self.step()
            full = len(running) == self._sizes.running or not self.scheduler.waiting
            return full and all(request.num_output_tokens for request in running)

        wait_until(is_filled)

    def wait_for_one(self, count: int) -> list[Request]:
        """So many requests that begin with the prompt of one whose load runs: they wait for it."""
        shared = prompt(-1)
        self.add(shared).max_tokens = 1
        self._computing_s = COMPUTING_S  # so long that it is worth waiting for
        wait_until(lambda: self.step() or not self.scheduler.has_requests())
        self._computing_s = 0.0
        self.scheduler.kv_cache_manager.block_pool.evict_blocks(set(range(self._sizes.device_blocks)))
        self.copies_held = True
        self.add(shared)
        wait_until(lambda: self.step() or bool(self._loads))
        waiting = [self.add([*shared, number]) for number in range(3, count + 3)]
        self.step()
        return waiting

    def end_all(self) -> float:
        """Seconds of a step in which all running requests end while their copies are under way, and the next one."""
        self.copies_held = True
        for request in self.scheduler.running:
            request.max_tokens = request.num_output_tokens + 2
        self.step()
        self.step()
        assert not self.scheduler.running
        seconds = self.processor_s
        self.copies_held = False
        self.step()
        return seconds + self.processor_s

    def ask(self, requests: Sequence[Request]) -> float:
        """Seconds of the scheduler's question how much matches, for each of these requests, which all wait."""
        question = self.scheduler.connector.get_num_new_matched_tokens
        began = time.thread_time()
        answers = [question(request, 0) for request in requests]
        seconds = (time.thread_time() - began) / len(requests)
        assert all(tokens is None for tokens, _ in answers)
        return seconds

    def close(self) -> None:
        self.scheduler.shutdown()
        if self._rank is not None:
            self._rank.close()


def wait_until(reached: Callable[[], bool]) -> None:
    """Poll until it is reached; raises TimeoutError after a minute."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not reached():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the scheduler, or the manager, did not get so far within a minute")
        time.sleep(0.001)


def prompt(number: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    """The tokens of a prompt that no other one shares; its blocks are complete at other steps than its neighbours'."""
    return [3 + (number * 7919 + place * 31) % 4000 for place in range(blocks * BLOCK_TOKENS + number % 16)]


def measure(engines: Sequence[Engine], sizes: Sizes) -> Found:
    """Seconds by what was measured and by column. The engines take turns."""
    found: Found = {}

    def note(what: str, engine: Engine, seconds: float) -> None:
        found.setdefault(what, {}).setdefault(engine.column, []).append(seconds)

    for engine in engines:
        for number in range(sizes.running):
            engine.add(prompt(number))
        engine.fill()
    gc.collect()
    gc.freeze()  # as vLLM does when an engine has started
    for number in range(sizes.waiting):
        for engine in engines:
            engine.add(prompt(sizes.running + number))
            note(ARRIVES, engine, engine.processor_s)
    for step in range(WARM_STEPS + sizes.steps):
        for engine in engines:
            engine.step()
            if step >= WARM_STEPS:
                note(STEP, engine, engine.processor_s)
    while engines[0].scheduler.running:
        for engine in engines:
            note(END, engine, engine.end_all())
            engine.fill()
    return found


def measure_waits(engines: Sequence[Engine], sizes: Sizes) -> dict[str, list[float]]:
    """Seconds of a question about a request that waits, by column."""
    found: dict[str, list[float]] = {}
    for engine in engines:
        waiting = engine.wait_for_one(sizes.waiting)
        for _ in range(ASKED_ROUNDS):
            engine.step()
            found.setdefault(engine.column, []).append(engine.ask(waiting))
    return found


def table(found: Found) -> Table:
    """What KVBM and vLLM's own offloading add to vLLM alone, and the ratio of the two."""
    columns = ("what", "vLLM alone", "KVBM adds", "its own adds", "budget", "ratio")
    drawn = plain_table(columns, words={"what"}, title="vLLM's scheduler, processor ms, medians")
    for what, columns_s in found.items():
        alone, ours, vllm = (statistics.median(columns_s.get(column, [0.0])) * 1e3 for column in COLUMNS)
        drawn.add_row(
            what,
            f"{alone:.4g}" if alone else "",
            f"{ours - alone:.3g}",
            f"{vllm - alone:.3g}",
            f"{BUDGETS_MS[what]:g}" if what in BUDGETS_MS else "",
            f"{(ours - alone) / (vllm - alone):.2f}",
        )
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256, help="requests that run")
    parser.add_argument("--waiting", type=int, default=1744, help="requests that wait")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(options.running, options.waiting, options.steps)
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory:
        os.chmod(directory, 0o700)
        engines = [Engine(column, Path(directory), sizes) for column in COLUMNS]
        found = measure(engines, sizes)
        engines += [Engine(column, Path(directory), sizes) for column in COLUMNS[1:]]
        found[WAITS] = measure_waits(engines[len(COLUMNS) :], sizes)
        for engine in engines:
            engine.close()
    save_json(found, options.output / "scheduler-steps.json")
    console().print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
