"""Two runs that answer differently: was it wrong KV, or rounding between two tokens that are equally likely?

The server computes the prompt anew, without any cache, and says how likely it takes both tokens to be.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvbm.demo.client import Likelihoods, RequestError
from kvbm.demo.report import AnsweredRequest, divergence

Anew = Callable[[AnsweredRequest, int], Likelihoods]
"""Computes a request's first tokens, so many of them, without any cache. May raise RequestError."""


def apart(anew: Anew, want: AnsweredRequest, got: AnsweredRequest) -> AnsweredRequest:
    """`got`, with how far apart the two first differing tokens are; as it was where nothing differs, or it is unknown.

    It is known where the answer that is computed anew begins as both did, and has both tokens among the likeliest.
    """
    at = divergence(want.token_ids, got.token_ids)
    if at >= min(len(want.token_ids), len(got.token_ids)):
        return got
    try:
        answer = anew(got, at + 1)
    except RequestError:  # not every server tells likelihoods: then the difference stands
        return got
    if answer.token_ids[:at] != got.token_ids[:at] or len(answer.steps) <= at:
        return got
    left, right = (answer.steps[at].get(each.token_ids[at]) for each in (want, got))
    if left is None or right is None:
        return got
    return msgspec.structs.replace(got, apart_nats=abs(left - right))
