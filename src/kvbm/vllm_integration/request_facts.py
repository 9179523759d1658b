"""What a request says beside its tokens.

For people who ask why it missed (`told_of`): its first tokens, and what shapes its keys beside the tokens; nothing is
decided by that. For policies (`asker_of`): who asks, and what its client says of its future. Digests where the text may
be a secret or long.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from kvbm.hints import UNHINTED, ClientHint, Verdict, read_hint, tenant_digest
from kvbm.leader.tracked import Told, readable
from kvbm.vllm_integration.hints import hint_of

_DIGEST_BYTES = 16


def told_of(request: Any, block_tokens: int) -> Told:
    """The facts of a request of vLLM."""
    extras: dict[str, str] = {}
    if request.lora_request is not None:
        extras["adapter"] = readable(str(getattr(request.lora_request, "lora_name", "")))
    if salt := getattr(request, "cache_salt", None):
        extras["cache_salt"] = _short(salt)
    if features := getattr(request, "mm_features", None):
        extras["media"] = _short("\0".join(str(feature.identifier) for feature in features))
    tokens = getattr(request, "prompt_token_ids", None)
    return Told(prompt_digest(tokens or [], block_tokens), tuple(extras.items()))


def asker_of(request: Any) -> ClientHint:
    """Who sends a request of vLLM, and what they say of its future. Nothing that a client sends raises."""
    read = read_hint(hint_of(request))
    salt = getattr(request, "cache_salt", None)
    tenant = tenant_digest(salt) if salt else ""
    return ClientHint(tenant, read.hint, read.verdicts) if tenant or read.verdicts else UNHINTED


def answer(verdicts: Sequence[Verdict]) -> dict[str, Any] | None:
    """What became of a client's hint, for `kv_transfer_params` of the response; None without one.

    Not under the name of the hint: a proxy may hand these on to an engine that decodes.
    """
    told = [
        {"part": part, "outcome": outcome.value, **({"reason": reason} if reason else {})}
        for part, outcome, reason, _ in verdicts
    ]
    return {"kvbm_hints": told} if told else None


def prompt_digest(tokens: Sequence[int], block_tokens: int) -> bytes:
    """By this a manager recognises the same first block of tokens; empty for a prompt that is shorter."""
    if len(tokens) < block_tokens:
        return b""
    return blake3(array("q", tokens[:block_tokens]).tobytes()).digest(_DIGEST_BYTES)


def _short(text: str) -> str:
    return blake3(text.encode(errors="surrogatepass")).hexdigest()[:8]
