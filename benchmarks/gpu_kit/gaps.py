"""Gaps between the tokens of an answer beside other requests: vLLM alone, with KVBM's stores, with page locking.

One long answer is timed. Beside it other answers are generated and new prompts are computed, all of which KVBM stores.
Every engine gets the same requests, so the difference to vLLM alone is KVBM's.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.engine import BLOCK_TOKENS, CONNECTOR, prompt
from benchmarks.gpu_kit.engines import set_environment
from benchmarks.gpu_kit.first_tokens import engine_model
from benchmarks.gpu_kit.ledger import Row, make_row

TIMED = "timed"
ANSWER_TOKENS, REHEARSED_TOKENS = 1024, 96
BESIDE = 7
PROMPT_TOKENS, REHEARSED_PROMPT = 2048, 256
PROMPT_EVERY = 64
"""Tokens of the timed answer between two new prompts."""
WARM_TOKENS = 8


def measure(request: dict[str, Any]) -> Row:
    """The row of one engine."""
    options, rehearse = request["options"], request["rehearse"]
    set_environment(_environment(options, rehearse))
    from vllm import LLM

    model, more = engine_model(Path(request["folder"]), rehearse)
    answer, long = (REHEARSED_TOKENS, REHEARSED_PROMPT) if rehearse else (ANSWER_TOKENS, PROMPT_TOKENS)
    length = -(-(long + answer + BLOCK_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS
    if options.get("kvbm"):
        more["kv_transfer_config"] = dict(CONNECTOR)
    llm = LLM(
        str(model),
        dtype="bfloat16",
        **{"enforce_eager": True, **more},
        block_size=BLOCK_TOKENS,
        max_model_len=length,
        max_num_seqs=16,
        num_gpu_blocks_override=16 * length // BLOCK_TOKENS,
        disable_log_stats=False,
    )
    try:
        began_s = time.perf_counter()
        gaps = time_tokens(llm.llm_engine, answer, long)
        took_s = time.perf_counter() - began_s
    finally:
        llm.llm_engine.engine_core.shutdown()
    data: dict[str, Any] = summarize(gaps)
    row: dict[str, Any] = {"beside": options["beside"], **data, "answers took s": took_s}
    alone = request.get("reference")
    row["p99 × alone"] = data["p99 ms"] / alone["p99 ms"] if alone else 1.0
    return make_row([], data, "Gaps between tokens", [row])


def _environment(options: dict[str, Any], rehearse: bool) -> dict[str, str]:
    values = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if rehearse else {}
    if options.get("kvbm"):
        values["DYN_KVBM_CPU_CACHE_GB"] = str(1 if rehearse else options["host_gb"])
    return values


def time_tokens(engine: Any, answer: int, long: int) -> list[float]:
    """Seconds between the tokens of the timed answer, which begins at once: pages are locked from the first copy on."""
    seen, last_s, asked = 0, 0.0, 0
    gaps: list[float] = []

    def ask(name: str, seed: int, tokens: int, count: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt(seed, tokens)}, sampling)

    for number in range(BESIDE):
        ask(f"beside-{number}", number, 64, answer)
    ask(TIMED, BESIDE, 64, answer)
    while seen < answer:
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.request_id != TIMED:
                continue
            new = len(output.outputs[0].token_ids) - seen
            if seen >= WARM_TOKENS and new > 0:
                # Tokens that arrive together have waited for each other.
                gaps += [now_s - last_s] + [0.0] * (new - 1)
            seen, last_s = seen + new, now_s
        while asked < seen // PROMPT_EVERY:
            asked += 1
            ask(f"prompt-{asked}", 100 + asked, long, 1)
    while engine.has_unfinished_requests():
        engine.step()
    return gaps


def summarize(gaps: list[float]) -> dict[str, float]:
    """The middle, the slow end and the worst of the gaps, in milliseconds."""
    ordered = sorted(gaps)
    return {
        "p50 ms": statistics.median(ordered) * 1e3,
        "p99 ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        "longest ms": ordered[-1] * 1e3,
    }
