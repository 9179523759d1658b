"""What `kvbm why` compares: the first tokens of a request, and what shapes its keys beside the tokens.

Digests where the text may be a secret or long. Nothing is decided by them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from kvbm.leader.tracked import Told, readable

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


def prompt_digest(tokens: Sequence[int], block_tokens: int) -> bytes:
    """By this a manager recognises the same first block of tokens; empty for a prompt that is shorter."""
    if len(tokens) < block_tokens:
        return b""
    return blake3(array("q", tokens[:block_tokens]).tobytes()).digest(_DIGEST_BYTES)


def _short(text: str) -> str:
    return blake3(text.encode(errors="surrogatepass")).hexdigest()[:8]
