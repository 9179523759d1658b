"""How likely an engine takes tokens to be. Rounding moves that a little, KV that is not of the prompt moves it far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from engine.engine_child import Child
from engine.workload import Request

TOP = 10

Likelihoods = dict[str, dict[int, float]]
"""The natural logarithms of the probabilities of the first token's likeliest values, by request."""


def of_first_tokens(
    child: Child, requests: Sequence[Request], on_device: bool
) -> tuple[Likelihoods, dict[str, int]]:
    """What follows each prompt, one request after the other, and how many tokens of each were cached.

    Unless `on_device`, nothing is found on the device.
    """
    from vllm import SamplingParams

    assert child.engine is not None
    core = child.engine.core
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=TOP)
    likelihoods: Likelihoods = {}
    cached_tokens: dict[str, int] = {}
    for request in requests:
        assert on_device or child.engine.scheduler.reset_prefix_cache()
        core.add_request(request.name, {"prompt_token_ids": list(request.tokens)}, params)
        while core.has_unfinished_requests():
            for output in core.step():
                (step,) = output.outputs[0].logprobs
                likelihoods[request.name] = {token: entry.logprob for token, entry in step.items()}
                cached_tokens[request.name] = output.num_cached_tokens
        child.engine.wait_for_stores()
    return likelihoods, cached_tokens


def apart(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """The largest difference between likelihoods of the same token; infinite where no token is in both."""
    both = first.keys() & second.keys()
    return max((abs(first[token] - second[token]) for token in both), default=math.inf)
