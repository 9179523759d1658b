"""A digest of what a model's rotary modules do to K.

Settings do not show it: `max_model_len` decides which factors LongRoPE takes, and the table of both kinds is the same
buffer. So each module is run: fixed vectors at spread positions go in, and its output is digested.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.vllm")

GRID = 1024.0
"""Outputs are rounded to steps of 1/1024: far above the rounding errors of a table, far below the differences that
other angles make at some of the positions."""

_HEADS = 2
_POSITIONS_WHERE_UNKNOWN = 2048


def rotary_modules() -> list[Any]:
    """The rotary modules that models of this process share (vLLM makes one for each set of parameters)."""
    from vllm.model_executor.layers import rotary_embedding

    return list(rotary_embedding._ROPE_DICT.values())


def rotary_digest(modules: Iterable[Any]) -> str:
    """32 hex digits over the modules' behaviour, in any order; `none` without modules."""
    behaviours = sorted({_behaviour(module) for module in modules})
    return hashlib.sha256("".join(behaviours).encode()).hexdigest()[:32] if behaviours else "none"


def _behaviour(module: Any) -> str:
    """A digest of the module's output for fixed vectors; where it cannot be run like that, of all its contents."""
    try:
        with torch.no_grad():
            parts = [_on_grid(tensor) for tensor in _answers(module)]
    except Exception as error:  # every model may bring a module of its own
        record_swallowed(error)
        log.debug("%s is taken by its contents: %s", type(module).__name__, error)
        parts = [type(module).__qualname__.encode(), *_contents(module)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _answers(module: Any) -> Iterator[torch.Tensor]:
    """The module's output for each form of positions that it takes."""
    table = max((buffer for buffer in module.buffers() if buffer.dim() >= 2), key=torch.Tensor.numel)
    positions = _spread(_position_count(module)).to(table.device)
    # The plain implementation: a compiled or a custom one would only round otherwise.
    rotate = getattr(module, "forward_native", None) or module.forward
    forms = [positions]
    if getattr(module, "mrope_section", None):
        # Rows for time, height and width: which of them turns which dimension shows only where they differ.
        forms.append(torch.stack([positions, positions.flip(0), positions.roll(1)]))
    for form in forms:
        given = _vectors(len(positions), int(module.head_size)).to(table.device, table.dtype)
        outputs = rotate(form, given.clone(), given.flip(0))
        yield from (output for output in outputs if isinstance(output, torch.Tensor))


def _position_count(module: Any) -> int:
    """How many positions surely lie in the module's tables: one beyond them would end a CUDA context."""
    rows = [int(buffer.shape[0]) for buffer in module.buffers() if buffer.dim() >= 2]
    known = int(getattr(module, "max_position_embeddings", None) or _POSITIONS_WHERE_UNKNOWN)
    return min((known, *rows))


def _spread(count: int) -> torch.Tensor:
    """Positions below `count`: neighbours at the front, then ever further apart, and odd ones between them."""
    marks = {0, 1, 2, 3}
    for exponent in range(2, count.bit_length() + 1):
        marks |= {(1 << exponent) - 1, 5 * (1 << exponent) // 3}
    return torch.tensor(sorted(mark for mark in marks if mark < count), dtype=torch.int64)


def _vectors(count: int, head_size: int) -> torch.Tensor:
    """`[count, heads * head_size]`, different in every dimension and exact in every dtype."""
    numbers = torch.arange(count * _HEADS * head_size, dtype=torch.int64)
    return ((numbers * 7919) % 17 - 8).reshape(count, -1) / 8.0


def _contents(module: Any) -> Iterator[bytes]:
    """All buffers and plain attributes of a module and those inside it, by name."""
    for name, buffer in sorted(module.named_buffers()):
        yield name.encode()
        yield _on_grid(torch.view_as_real(buffer) if buffer.is_complex() else buffer)
    for path, inner in module.named_modules():
        plain = {key: value for key, value in vars(inner).items() if not key.startswith("_")}
        kinds = (bool, int, float, str, tuple, list)
        yield f"{path}:{sorted((k, repr(v)) for k, v in plain.items() if isinstance(v, kinds))}".encode()


def _on_grid(tensor: torch.Tensor) -> bytes:
    steps = torch.round(tensor.detach().to("cpu", torch.float64) * GRID).to(torch.int64)
    content: bytes = steps.contiguous().numpy().tobytes()
    return content
