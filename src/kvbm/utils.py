"""Names of the original's `kvbm.utils` for code that imports them; ours are elsewhere, in files with one idea each."""

from __future__ import annotations

import importlib
from typing import Any

from kvbm.settings import is_truthy as is_truthy
from kvbm.settings import load_settings, process_environment


def get_consolidator_mode() -> str:
    """`dedup` or `passthrough`, from `DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE`. Raises SettingsError."""
    return load_settings(process_environment()).settings.consolidator_mode


def is_dyn_runtime_enabled() -> bool:
    """Whether `DYN_RUNTIME_ENABLED_KVBM` asks for Dynamo's runtime. Raises SettingsError for what is no switch."""
    return load_settings(process_environment()).settings.dynamo_runtime


def annotate(*args: Any, **kwargs: Any) -> Any:
    """NVIDIA's `nvtx.annotate`, for profilers, where the package `nvtx` is installed; else it changes nothing.

    As there: `@annotate`, `@annotate("what", color=…)`.
    """
    try:
        return importlib.import_module("nvtx").annotate(*args, **kwargs)
    except ImportError:
        bare = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if bare else _unchanged


def nvtx_annotate(func: Any = None, *, domain: str = "kvbm", category: str | None = None) -> Any:
    """`@nvtx_annotate` or `@nvtx_annotate(category=…)`: calls of a function are a range with its name."""

    def annotated(function: Any) -> Any:
        more = {} if category is None else {"category": category}
        return annotate(message=function.__qualname__, color="green", domain=domain, **more)(function)

    return annotated if func is None else annotated(func)


def _unchanged(function: Any) -> Any:
    return function
