"""What a model runner does to the connector and to KV, in order, step by step: noted inside the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.engine_child import Child

CONNECTOR = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
RUNNER = ("update_requests", "sample")

_steps: list[tuple[str, ...]] = []
_notes: list[str] = []


def note_calls(child: Child) -> None:
    """From now on note each step's calls; of V2, whose runner has the methods named above."""
    assert child.engine is not None
    worker = child.engine.core.model_executor.driver_worker.worker
    _steps.clear()
    _notes.clear()
    for name in RUNNER:
        _note(worker.model_runner, name)
    for name in CONNECTOR:
        _note(child.engine.worker_half, name)
    take = child.engine.worker_half.clear_connector_metadata

    def clear() -> None:
        take()
        _steps.append(_forward_as_one(_notes))
        _notes.clear()

    child.engine.worker_half.clear_connector_metadata = clear


def orders_noted(child: Child) -> set[tuple[str, ...]]:
    """The orders of calls that occurred, each once."""
    return set(_steps)


def _note(owner: Any, name: str) -> None:
    method: Callable[..., Any] = getattr(owner, name)

    def noted(*arguments: Any, **more: Any) -> Any:
        _notes.append(name)
        return method(*arguments, **more)

    setattr(owner, name, noted)


def _forward_as_one(notes: list[str]) -> tuple[str, ...]:
    """With the calls for all layers as one, `forward`, if they are one pair after the other."""
    order: list[str] = []
    layers = 0
    for at, name in enumerate(notes):
        if name == "wait_for_layer_load":
            assert notes[at + 1] == "save_kv_layer"
            layers += 1
            if layers == 1:
                order.append("forward")
        elif name != "save_kv_layer":
            assert layers in (0, 2), "the tiny model has two layers"
            order.append(name)
    return tuple(order)
