"""What shapes a request's KV besides its tokens: salt, adapter, media. What cannot be named is not kept.

The match is asked with the engine's C++ request, which knows less than the Python one that comes later: the salt's
number and not its text, an adapter's number and not its path. So paths of adapters are learned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from blake3 import blake3

from kvbm.hints import UNHINTED, ClientHint, tenant_digest
from kvbm.leader.tracked import Told

log = logging.getLogger("kvbm.trtllm")

_DIGEST_BYTES = 16


class Unkept:
    """Counts requests whose blocks are not kept, by reason; one line for the first and for each ten times as many."""

    def __init__(self) -> None:
        self.by_reason: dict[str, int] = {}

    def note(self, reason: str) -> None:
        """One more request."""
        count = self.by_reason[reason] = self.by_reason.get(reason, 0) + 1
        if str(count).strip("0") == "1":
            log.warning("blocks of %d request%s are not kept: %s", count, "s" if count > 1 else "", reason)


ADAPTERS_MAX = 4096


class AdapterPaths:
    """Where the adapter of each number lies. An engine loads a number's adapter once.

    Bounded: the path of one more number is not learned, and its blocks are not kept. None is forgotten: another path
    might be taken for that of what was loaded.
    """

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._moved: set[int] = set()

    def learn(self, request: Any) -> None:
        """A request of the engine's Python side may name the path of its adapter."""
        number, path = adapter_number(request), getattr(request, "py_lora_path", None)
        if number not in self._paths and len(self._paths) >= ADAPTERS_MAX:
            return
        if number is not None and path and self._paths.setdefault(number, str(path)) != str(path):
            self._moved.add(number)

    def path(self, number: int) -> str | None:
        """The path; None where no request has named it, or several have named others."""
        return None if number in self._moved else self._paths.get(number)


def adapter_number(request: Any) -> int | None:
    """The number of the request's adapter, if it has one."""
    number = getattr(request, "lora_task_id", None)
    return int(number) if number is not None else None


def salt_of(request: Any) -> str:
    """The request's salt, or what the engine made of it; empty for none."""
    number = getattr(request, "cache_salt_id", None)
    if number is None:
        text = getattr(request, "cache_salt", None)
        return f"text:{text}" if text is not None else ""
    return f"number:{number}"


def tells_salt(request: Any) -> bool:
    """Whether this release's requests say which salt they have at all."""
    return hasattr(request, "cache_salt_id") or hasattr(request, "cache_salt")


def media_reason(request: Any, tokens: Sequence[int], placeholders: frozenset[int]) -> str:
    """Why the request's media cannot be part of its keys, in one line; empty where they can, and where it has none.

    `placeholders` are tokens that stand for media.
    """
    positions = getattr(request, "multimodal_positions", None)
    if positions:
        hashes = getattr(request, "multimodal_hashes", None)
        lengths = getattr(request, "multimodal_lengths", None)
        if hashes and lengths and len(hashes) == len(lengths) == len(positions):
            return ""
        return "multimodal input whose content the engine does not name by hash, position and length"
    embedded = (
        "multimodal_embedding",
        "prompt_embedding_table",
        "mrope_rotary_cos_sin",
        "py_multimodal_data",
    )
    if any(_present(getattr(request, name, None)) for name in embedded) or placeholders.intersection(tokens):
        return "multimodal input without positions and hashes"
    return ""


def block_extras(request: Any, block_tokens: int) -> Callable[[int], bytes]:
    """What stands in the key of each block beside its tokens: the salt, and the media that lie in it."""
    salt = blake3(salt_of(request).encode(errors="surrogatepass")).digest() if salt_of(request) else b""
    positions = list(getattr(request, "multimodal_positions", None) or ())
    if not positions:
        return lambda block: salt
    media = [
        (int(start), int(start) + int(length), ",".join(map(str, content)).encode())
        for start, length, content in zip(
            positions, request.multimodal_lengths, request.multimodal_hashes, strict=True
        )
    ]

    def extras(block: int) -> bytes:
        first, end = block * block_tokens, (block + 1) * block_tokens
        parts = [
            b"%d:%d:%s;" % (start - first, stop - start, content)
            for start, stop, content in media
            if start < end and stop > first
        ]
        return salt + b"media" + b"".join(parts) if parts else salt

    return extras


def told_of(request: Any, tokens: Sequence[int], block_tokens: int) -> Told:
    """What people are told of a request that misses: digests only."""
    extras: list[tuple[str, str]] = []
    if (number := adapter_number(request)) is not None:
        extras.append(("adapter", str(number)))
    if salt := salt_of(request):
        extras.append(("cache_salt", blake3(salt.encode(errors="surrogatepass")).hexdigest()[:8]))
    if len(tokens) < block_tokens:
        return Told(b"", tuple(extras))
    first = b"".join(int(token).to_bytes(8, "little", signed=True) for token in tokens[:block_tokens])
    return Told(blake3(first).digest(_DIGEST_BYTES), tuple(extras))


def asker_of(request: Any) -> ClientHint:
    """Who asks; what its client says of its future comes later."""
    salt = salt_of(request)
    return ClientHint(tenant_digest(salt)) if salt else UNHINTED


def media_tokens(config: dict[str, Any]) -> frozenset[int]:
    """Tokens that stand for media, by the model's configuration."""
    kinds, ends = ("image", "video", "audio", "vision"), ("_token_id", "_token_index")
    return frozenset(
        value
        for name, value in config.items()
        if isinstance(value, int) and name.endswith(ends) and any(kind in name for kind in kinds)
    )


def _present(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)
