"""Answers with and without KVBM, on a device that evicts: equal to the token, unless the KV is damaged on purpose.

The requests are conversations about a few long prefixes: each comes back twice with what was said before, after others
have taken its place on the device. Every case asks the same in a process of its own.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.engines import outputs_arguments, outputs_environment, set_environment, what_ran
from benchmarks.gpu_kit.ledger import RIGHT, WRONG

PREFIX_TOKENS = (320, 256, 200, 416)
FIRST_TOKEN, LAST_TOKEN = 10, 4000
ANSWER_TOKENS = 24
ADDED_TOKENS = 20
TALKS, REHEARSED_TALKS = 24, 8
WAVES = 3
Answers = dict[str, list[int]]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The row of one case: the answers, what was loaded, and how many answers are not those of the reference."""
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
    answers, likelihoods, ended = talk(
        llm, REHEARSED_TALKS if rehearse else TALKS, options.get("waves", WAVES)
    )
    data |= {"asked s": round(time.monotonic() - began_s, 1), "answers": answers, "likelihoods": likelihoods}
    data |= {"requests": len(answers), "ended early": len(ended), "faults": len(struck)}
    data |= loaded_tokens(llm)
    llm.llm_engine.engine_core.shutdown()
    return judge(options, data, ended, request.get("reference"))


def _model(request: dict[str, Any]) -> Path:
    from benchmarks.gpu_kit.engines import SHAPE_LAYERS
    from benchmarks.gpu_kit.shapes import write_shape
    from kvbm.testing.tiny_model import make_model

    models, options = Path(request["folder"]) / "models", request["options"]
    if shape := options.get("shape"):
        return write_shape(models, shape, small=request["rehearse"], layers=SHAPE_LAYERS)
    return make_model(models / "tiny", "tiny", "float32")


def talk(llm: Any, talks: int, waves: int) -> tuple[Answers, dict[str, list[float]], set[str]]:
    """Ask all waves; answers and log-likelihoods by request, and the requests that ended with an error."""
    from vllm import SamplingParams

    source = random.Random(1)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    prefixes = [_random_tokens(source, count) for count in PREFIX_TOKENS]
    said = [prefixes[i % len(prefixes)] + _random_tokens(source, source.randint(5, 70)) for i in range(talks)]
    answers: Answers = {}
    likelihoods: dict[str, list[float]] = {}
    ended: set[str] = set()
    for wave in range(waves):
        asked = [{"prompt_token_ids": tokens} for tokens in said]
        for i, output in enumerate(llm.generate(asked, sampling, use_tqdm=False)):
            name, completion = f"talk {i}, turn {wave + 1}", output.outputs[0]
            answers[name] = list(completion.token_ids)
            likelihoods[name] = [
                round(step[token].logprob, 6)
                for step, token in zip(completion.logprobs or [], completion.token_ids, strict=False)
            ]
            if completion.finish_reason == "error":
                ended.add(name)
            said[i] = said[i] + answers[name] + _random_tokens(source, ADDED_TOKENS)
    return answers, likelihoods, ended


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


def judge(
    options: dict[str, Any], data: dict[str, Any], ended: set[str], reference: dict[str, Any] | None
) -> dict[str, Any]:
    """Whether a case showed what it should, and why not. Pure, so that it can be tested without an engine."""
    wrong: list[str] = []
    fault, fails = options.get("fault"), options.get("policy") == "fail"
    if reference is not None:
        differ = differences(reference["answers"], data["answers"], ended if fails else set())
        data["different"] = len(differ)
        if not fails:
            data["likelihoods off by"] = farthest(reference["likelihoods"], data["likelihoods"])
        if fault == "damage" and not differ:
            wrong.append("damaged KV changed no answer: equal answers prove nothing here")
        if fault != "damage" and differ:
            wrong.append(f"{len(differ)} of {len(reference['answers'])} answers differ, first {differ[0]}")
    loaded = data["tokens from host"] + data["tokens from disk"]
    if options.get("kvbm") and not loaded and not (fault == "fail" and options["every"] == 1):
        wrong.append("nothing was loaded")
    if options.get("disk") and not data["tokens from disk"]:
        wrong.append("nothing was loaded from disk")
    if fault and not data["faults"]:
        wrong.append("no fault was injected")
    if ended and not fails:
        wrong.append(f"{len(ended)} requests ended with an error")
    if fails and not ended:
        wrong.append("no request ended with an error")
    return {"state": WRONG if wrong else RIGHT, "why": "; ".join(wrong), "data": data}


def differences(reference: Answers, answers: Answers, ended: set[str]) -> list[str]:
    """Requests whose answers are others than the reference's. One that `ended` early needs no more than its start, and
    what is asked behind it in the same talk is another question."""
    cut = {name.split(",")[0] for name in ended}
    different: list[str] = []
    for name, right in reference.items():
        given = answers.get(name, [])
        if name in ended:
            right = right[: len(given)]
        elif name.split(",")[0] in cut and not _asked_before(name, ended):
            continue
        if given != right:
            different.append(name)
    return different


def _asked_before(name: str, ended: set[str]) -> bool:
    """Whether a request came before the first of its talk that ended early."""
    talk_name, turn = name.split(", turn ")
    return all(
        int(turn) < int(other.split(", turn ")[1]) for other in ended if other.startswith(talk_name + ",")
    )


def farthest(reference: dict[str, list[float]], likelihoods: dict[str, list[float]]) -> float:
    """The largest difference between likelihoods of the same token of the same answer."""
    apart = [
        abs(right - given)
        for name, all_right in reference.items()
        for right, given in zip(all_right, likelihoods.get(name, []), strict=False)
    ]
    return round(max(apart, default=0.0), 6)
