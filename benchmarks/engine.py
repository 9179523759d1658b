"""One vLLM engine under measurement: front end in this process, EngineCore and worker in their own, as by default.

Every scenario is measured in a process of its own, started by `in_own_process`, so that no engine inherits anything
of another one and a hung engine is ended with all it started.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from kvbm.testing.tiny_model import SHAPES, DType, Size

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TOKENS = 128
CONNECTOR = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_load_failure_policy": "recompute",
}
WAIT_S_MAX = 20.0
QUIET_S = 0.6
POLL_S = 0.2


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is set up. `tier` is what a request after a device reset is expected to hit; None: nothing."""

    name: str
    tier: str | None
    environment: dict[str, str] = {}
    transfer_config: dict[str, Any] | None = None
    files: str | None = None


class PromptKv(NamedTuple):
    """The KV of a prompt: blocks of all groups that a tier stores of it at most, those that a hit loads, and the bytes
    of each."""

    stored_blocks: int
    loaded_blocks: int
    block_bytes: int


def prompt_kv(size: str, dtype: DType, tokens: int) -> PromptKv:
    """The KV of a prompt of `tokens` tokens: all blocks of layers that see all tokens, and the windows of the others,
    which are stored where the prompt may be taken up again and where it ends."""
    shape = SHAPES[cast("Size", size)]
    blocks = tokens // BLOCK_TOKENS
    window = (shape.groups - 1) * -(-(shape.window - 1) // BLOCK_TOKENS) if shape.window else 0
    block_bytes = shape.kv_bytes_per_token(dtype) * BLOCK_TOKENS // shape.groups
    return PromptKv(blocks + 2 * window, blocks + window, block_bytes)


def prepare_environment(scenario: Scenario) -> None:
    """Set what vLLM reads from the environment, before it is imported: the same for every engine."""
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),
            # By itself vLLM sets aside more cores with a connector than without: every engine gets the same.
            "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            **scenario.environment,
        }
    )


class Engine:
    """A running `vllm.LLM`, to be used in a `with` statement. Not thread-safe."""

    def __init__(
        self,
        model: str,
        scenario: Scenario,
        *,
        prompt_tokens: int,
        dtype: str = "bfloat16",
        requests: int = 1,
        groups: int = 1,
        more: dict[str, Any] | None = None,
    ) -> None:
        """The device has room for `requests` requests of `prompt_tokens` at once, and a little. A model of several
        `groups` takes as many blocks of each. `more` are arguments of vLLM's own, in place of those here."""
        self._scenario = scenario
        prepare_environment(scenario)
        from vllm import LLM, SamplingParams

        blocks = -(-(prompt_tokens + BLOCK_TOKENS) // BLOCK_TOKENS)
        arguments: dict[str, Any] = {}
        if scenario.transfer_config is not None:
            arguments["kv_transfer_config"] = scenario.transfer_config
        self._llm = LLM(
            model,
            max_model_len=blocks * BLOCK_TOKENS,
            max_num_seqs=max(2, requests),
            block_size=BLOCK_TOKENS,
            # With one request: a device hit right after it, and nothing older.
            num_gpu_blocks_override=requests * groups * blocks + 4,
            disable_log_stats=False,
            **{"dtype": dtype, "enforce_eager": True, **arguments, **(more or {})},
        )
        self._sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        # Without this an error would wait for ever: the core is joined at exit and nothing tells it to go.
        self._llm.llm_engine.engine_core.shutdown()

    def first_token_s(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds until the first token of a prompt, and how many of its tokens were not computed."""
        started = time.perf_counter()
        output = self._llm.generate({"prompt_token_ids": prompt}, self._sampling, use_tqdm=False)[0]
        return time.perf_counter() - started, int(output.num_cached_tokens or 0)

    def all_answered_s(self, prompts: list[list[int]]) -> float:
        """Seconds until every one of these prompts, sent together, has its first token."""
        started = time.perf_counter()
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        self._llm.generate(asked, self._sampling, use_tqdm=False)
        return time.perf_counter() - started

    def reset_device(self) -> None:
        """Empty the device's prefix cache and nothing below it. Blocks may still be held by a store: it retries."""
        deadline = time.monotonic() + WAIT_S_MAX
        while not self._llm.reset_prefix_cache():
            assert time.monotonic() < deadline, "the device prefix cache cannot be reset: blocks stay in use"
            time.sleep(POLL_S)

    def hit_tokens(self, tier: str) -> int:
        """Prompt tokens that came from a tier since the start, as vLLM counts them."""
        for metric in self._llm.get_metrics():
            if metric.name == "vllm:prompt_tokens_cached_by_source" and metric.labels.get("source") == tier:
                return int(metric.value)
        return 0

    def wait_until_stored(self) -> None:
        """Wait until stores of the last request have ended, on every tier. Bounded."""
        deadline = time.monotonic() + WAIT_S_MAX
        last, since = self._activity(), time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - since < QUIET_S:
            time.sleep(POLL_S)
            now = self._activity()
            if now != last:
                last, since = now, time.monotonic()

    def loading_s(self) -> float:
        """Seconds that KVBM took to load blocks into the device, all requests so far; 0 for another connector."""
        lines = (line for line in self._kvbm_metrics() if line.startswith("kvbm_transfer_seconds_sum"))
        return sum(float(line.split()[-1]) for line in lines if 'target="device"' in line)

    def _activity(self) -> tuple[str, ...]:
        """Something that changes while bytes move to a lower tier."""
        if metrics := self._kvbm_metrics():
            return tuple(line for line in metrics if line.startswith("kvbm_transfer_bytes_total"))
        if self._scenario.files is not None:
            return (str(sum(1 for _ in Path(self._scenario.files).rglob("*.bin"))),)
        return ()

    def _kvbm_metrics(self) -> list[str]:
        port = self._scenario.environment.get("DYN_KVBM_METRICS_PORT")
        if port is None:
            return []
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            return str(page.read(), "utf-8").splitlines()


def prompt(seed: int, tokens: int) -> list[int]:
    """Random tokens; equal seeds give equal prompts, and only they do."""
    # As text: integers that differ in their sign alone seed alike.
    rng = random.Random(str(seed))
    return [rng.randrange(10, 4000) for _ in range(tokens)]


def end_with_children() -> None:
    """Let a polite end of this process pass through the clean-up that ends the engines it started."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def add_engine_arguments(parser: argparse.ArgumentParser, hybrid: bool = False) -> None:
    """The options of every benchmark that starts engines, and where a measurement in its own process writes to.
    With `hybrid` it is for models of several groups too."""
    sizes = [size for size, shape in SHAPES.items() if hybrid or shape.groups == 1]
    parser.add_argument("--size", choices=sorted(sizes), default="small", help="which of our own models")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights, KV and computation"
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one engine may take")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where model and JSON go")
    parser.add_argument("--result", help=argparse.SUPPRESS)


def passed_on(options: argparse.Namespace, **others: object) -> list[str]:
    """The arguments of a measurement in a process of its own: the model, the directory, and `others` by name."""
    chosen = {"size": options.size, "dtype": options.dtype, "output": options.output.absolute(), **others}
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def in_own_process(module: str, arguments: list[str], timeout_s: float) -> Any:
    """Run `python -m module … --result FILE` in a process group of its own; what it wrote there as JSON.

    Raises RuntimeError with the end of its output when it fails or takes too long.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result, log = Path(scratch) / "result.json", Path(scratch) / "log"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--result", str(result)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        if process.returncode == 0 and result.exists():
            return json.loads(result.read_text())
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"{' '.join(arguments)}: status {process.returncode}\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever of its group is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(1.0)
    process.wait(10)
