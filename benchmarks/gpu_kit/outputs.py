"""Answers with and without KVBM, on a device that evicts: equal to the token, unless the KV is damaged on purpose.

The requests are conversations about a few long prefixes: each comes back twice, after others have taken its place on
the device. Every case has the same requests and a process of its own.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.engines import outputs_arguments, outputs_environment, set_environment, what_ran
from benchmarks.gpu_kit.ledger import Row, make_row

PREFIX_TOKENS = (320, 256, 200, 416)
FIRST_TOKEN, LAST_TOKEN = 10, 4000
ANSWER_TOKENS = 24
ADDED_TOKENS = 20
TALKS, REHEARSED_TALKS = 24, 8
WAVES = 3
Answers = dict[str, list[int]]


def measure(request: dict[str, Any]) -> Row:
    """The row of one case: the answers, what was loaded, and how many answers differ from the reference."""
    options, rehearse = request["options"], request["rehearse"]
    set_environment(outputs_environment(options, request))
    from vllm import LLM

    from benchmarks.gpu_kit import faults
    from benchmarks.gpu_kit.shapes import peaky_weights

    peaky_weights()
    began_s = time.monotonic()
    llm = LLM(**outputs_arguments(options, _model(request), rehearse))
    data: dict[str, Any] = {"start s": round(time.monotonic() - began_s, 1), **what_ran(llm)}
    struck: list[int] = []
    if options.get("kvbm"):
        faults.wait_until_ready(llm)
    if options.get("fault") == "fail":
        struck = faults.fail_loads(options["every"])
    elif options.get("fault") == "damage":
        struck = faults.damage_loads()
    began_s = time.monotonic()
    data["answers"], ended = talk(llm, REHEARSED_TALKS if rehearse else TALKS)
    data |= {
        "seconds": time.monotonic() - began_s,
        "faults": len(struck),
        "ended": ended,
        **loaded_tokens(llm),
    }
    llm.llm_engine.engine_core.shutdown()
    return judge(request["case"], options, data, request.get("reference"))


def _model(request: dict[str, Any]) -> Path:
    from benchmarks.gpu_kit.engines import SHAPE_LAYERS
    from benchmarks.gpu_kit.shapes import write_shape
    from kvbm.testing.tiny_model import make_model

    models, options = Path(request["folder"]) / "models", request["options"]
    if shape := options.get("shape"):
        return write_shape(models, shape, small=request["rehearse"], layers=SHAPE_LAYERS)
    return make_model(models / "tiny", "tiny", "float32")


def talk(llm: Any, talks: int) -> tuple[Answers, int]:
    """Run all waves; answers by request, and how many requests ended with an error."""
    from vllm import SamplingParams

    source = random.Random(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    prefixes = [_random_tokens(source, count) for count in PREFIX_TOKENS]
    texts = [
        prefixes[i % len(prefixes)] + _random_tokens(source, source.randint(5, 70)) for i in range(talks)
    ]
    answers: Answers = {}
    ended = 0
    for wave in range(WAVES):
        prompts = [{"prompt_token_ids": tokens} for tokens in texts]
        for i, output in enumerate(llm.generate(prompts, sampling, use_tqdm=False)):
            completion = output.outputs[0]
            answer = answers[f"talk {i}, turn {wave + 1}"] = list(completion.token_ids)
            ended += completion.finish_reason == "error"
            texts[i] = texts[i] + answer + _random_tokens(source, ADDED_TOKENS)
    return answers, ended


def _random_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def loaded_tokens(llm: Any) -> dict[str, int]:
    """Prompt tokens that were not computed, by where they came from, as vLLM counts them."""
    tokens = {"device": 0, "host": 0, "disk": 0}
    for metric in llm.get_metrics():
        source = metric.labels.get("source")
        if metric.name == "vllm:prompt_tokens_cached_by_source" and source in tokens:
            tokens[source] += int(metric.value)
    return {f"tokens from {source}": count for source, count in tokens.items()}


def judge(case: str, options: dict[str, Any], data: dict[str, Any], reference: dict[str, Any] | None) -> Row:
    """The row of a case: wrong if it did not show what it should."""
    wrong: list[str] = []
    fault, answers = options.get("fault"), data["answers"]
    row = {"engine": case.removeprefix("engine/"), "answers": len(answers), "faults": data["faults"]}
    if reference is not None:
        differ = [name for name, right in reference["answers"].items() if answers.get(name) != right]
        row["different"] = len(differ)
        if fault == "damage" and not differ:
            wrong.append("damaged KV changed no answer: equal answers prove nothing here")
        if fault != "damage" and differ:
            wrong.append(f"{len(differ)} of {len(reference['answers'])} answers differ, first {differ[0]}")
    row |= {name: value for name, value in data.items() if name.startswith("tokens from")}
    if options.get("kvbm") and not data["tokens from host"] + data["tokens from disk"]:
        wrong.append("nothing was loaded")
    if options.get("disk") and not data["tokens from disk"]:
        wrong.append("nothing was loaded from disk")
    if fault and not data["faults"]:
        wrong.append("no fault was injected")
    if data["ended"]:
        wrong.append(f"{data['ended']} requests ended with an error")
    return make_row(wrong, data, "Answers", [row])
