"""The process that an engine lives in: it carries out what the test's process asks for, one call after the other.

The engine runs inside this process and is stepped by hand, so that a test can look and reach into it between steps.
Everything that differs between releases of vLLM is in `vllm_versions`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine import amx, model_runners
from engine.workload import BLOCK_TOKENS, MODEL_TOKENS_MAX, Request

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
KV_CONNECTOR = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_load_failure_policy": "recompute",
}


@dataclass
class Answers:
    """The results of one run: answers of the requests that were not aborted, and its costs."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    """What a connector tells the clients of the requests."""
    failed: set[str] = field(default_factory=set)
    """Ended by the engine with an error, or never asked because the request before it was."""
    aborted: int = 0
    steps: int = 0
    empty_steps: int = 0
    seconds: float = 0.0
    preempted: int = 0


def prepare(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Make this process's environment that of an engine; the engine's arguments."""
    for name in [name for name in os.environ if name.startswith(("DYN_", "VLLM_PP_"))]:
        del os.environ[name]
    os.environ.update(ENGINE_ENVIRONMENT)
    os.environ.update(environment)
    from vllm.config import KVEventsConfig, KVTransferConfig

    from kvbm import engine_start

    amx.hide_if_asked()
    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
        model_runners.sample_without_a_kernel()
    # This process is older than models that tests make for an engine in it.
    began_s = time.time()
    engine_start.engine_start_s = lambda: began_s

    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": MODEL_TOKENS_MAX,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        **options,
    }
    transfer = arguments.pop("kv_transfer_config", None)
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    if events := arguments.pop("kv_events_config", None):
        arguments["kv_events_config"] = KVEventsConfig(**events)
    return arguments


class Engine:
    """One vLLM engine in this process."""

    def __init__(self, options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        arguments = prepare(options, environment)
        import vllm

        self.llm = vllm.LLM(**arguments)
        self.core = self.llm.llm_engine
        self._preempted = 0
        self._adapters: dict[str, int] = {}
        self._count_preemptions()

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.engine_core.engine_core.scheduler

    @property
    def leader_half(self) -> Any:
        """The scheduler's connector."""
        return self.scheduler.connector

    @property
    def leader(self) -> Any:
        """Our leader, also where our connector is the first of several; None where KVBM is off or not asked for."""
        half = getattr(self.leader_half, "_connectors", [self.leader_half])[0]
        side = getattr(getattr(half, "_scheduler", None), "side", None)
        return side.leader if side is not None else None

    @property
    def worker_half(self) -> Any:
        """The worker's connector, in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int = 16,
        timeout_s: float = 170.0,
        between: Callable[[Engine, int], None] | None = None,
    ) -> Answers:
        """Answer all requests, `concurrency` at a time; `between(engine, finished)` is called after every step."""
        from vllm import SamplingParams

        run = Answers()
        before = self._preempted
        said: dict[str, tuple[int, ...]] = {}
        todo = list(requests)
        open_requests: dict[str, Request] = {}
        ages: dict[str, int] = {}
        started_s = time.monotonic()
        while todo or open_requests:
            if time.monotonic() - started_s > timeout_s:
                faulthandler.dump_traceback(all_threads=True)
                raise TimeoutError(f"hung: {sorted(open_requests)} after {run.steps} steps")
            for request in list(todo):
                if len(open_requests) >= concurrency:
                    break
                if request.parent in run.failed:
                    todo.remove(request)
                    run.failed.add(request.name)
                    continue
                if request.parent and request.parent not in said:
                    continue
                todo.remove(request)
                tokens = said.get(request.parent, ()) + request.tokens
                prompt: dict[str, Any] = {"prompt_token_ids": list(tokens)}
                if request.salt:
                    prompt["cache_salt"] = request.salt
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=request.output_count,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={"kv_transfer_params": {"kvbm": request.hint}} if request.hint else None,
                )
                self.core.add_request(request.name, prompt, params, lora_request=self._adapter(request.lora))
                open_requests[request.name], ages[request.name] = request, 0
            for name, request in list(open_requests.items()):
                if request.abort_after is not None and ages[name] >= request.abort_after:
                    self.core.abort_request([name])
                    del open_requests[name]
                    run.aborted += 1
                ages[name] += 1
            for output in self.core.step():
                request = open_requests.get(output.request_id)
                if request is None or not output.finished:
                    continue
                del open_requests[output.request_id]
                answer = list(output.outputs[0].token_ids)
                if output.outputs[0].finish_reason == "error" and request.abort_after is None:
                    run.failed.add(request.name)
                said[request.name] = said.get(request.parent, ()) + request.tokens + tuple(answer)
                run.cached_tokens[request.name] = output.num_cached_tokens or 0
                if output.kv_transfer_params:
                    run.told[request.name] = output.kv_transfer_params
                if request.abort_after is None:
                    run.outputs[request.name] = answer
            run.steps += 1
            if between is not None:
                between(self, len(run.outputs))
        run.seconds = time.monotonic() - started_s
        self.wait_for_stores()
        run.preempted = self._preempted - before
        return run

    def wait_for_stores(self) -> None:
        """Steps with nothing to do until what the last requests stored is copied and committed, a few seconds at most.

        vLLM's own loop takes one such step when the last request has ended, and more while a connector asks for them.
        """
        pending = getattr(self.leader_half, "has_pending_push_work", lambda: False)
        for _ in range(300):
            self.core.step()
            if not pending():
                break
            time.sleep(0.01)

    def _adapter(self, directory: str) -> Any:
        if not directory:
            return None
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(directory, len(self._adapters) + 1)
        return LoRARequest(f"adapter-{number}", number, directory)

    def close(self) -> None:
        """Stop the engine; the process can start another."""
        self.core.engine_core.shutdown()
        del self.llm, self.core
        clean_up()

    def _count_preemptions(self) -> None:
        scheduler, preempt = self.scheduler, self.scheduler._preempt_request

        def counted(*arguments: Any, **more: Any) -> Any:
            self._preempted += 1
            return preempt(*arguments, **more)

        scheduler._preempt_request = counted


def clean_up() -> None:
    """Drop what an engine, or half of one, left in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()  # collects garbage, too
    gc.freeze()  # what is left stays: later collections need not look at it


class Child:
    """What calls from the test's process find here: the engine of the moment."""

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def start(self, options: Mapping[str, Any], environment: Mapping[str, str]) -> float:
        """Start an engine, ending the one before; the seconds it took."""
        self.stop()
        started_s = time.monotonic()
        try:
            self.engine = Engine(options, environment)
        except BaseException:
            clean_up()
            raise
        return time.monotonic() - started_s

    def stop(self) -> None:
        """End the engine, if there is one."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()


def main(connection: Connection, log_path: str, runner: str) -> None:
    """Carry out calls `(function, arguments, keywords)` as `function(child, …)` until the other end closes.

    Engines have that model runner.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setsid()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    model_runners.choose(runner, Path(log_path).with_suffix(".triton"))
    child = Child()
    while True:
        try:
            function, arguments, keywords = connection.recv()
        except EOFError:
            break
        try:
            result: tuple[str, Any] = ("value", function(child, *arguments, **keywords))
        except BaseException as error:
            traceback.print_exc()
            result = ("error", f"{type(error).__name__}: {error}")
            if isinstance(error, SystemExit | KeyboardInterrupt):
                connection.send(result)
                break
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(result)
    child.stop()
