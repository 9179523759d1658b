"""The releases of TensorRT-LLM whose connector interface this was written from, and the lines for any other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

TESTED = "1.2.0rc2 to 1.3.0rc29"
"""Their sources were read. None of them was run."""
_OLDEST, _NEWEST = (1, 2, 0), (1, 3, 0)
_OLDEST_CANDIDATE, _NEWEST_CANDIDATE = 2, 29
_FINAL = 1 << 30


def absent(error: ImportError) -> ImportError:
    """The one line where the package, or the part of it that has the interface, is not there."""
    why = " ".join(str(error).split())
    return ImportError(
        f"kvbm.trtllm_integration needs tensorrt_llm, {TESTED}, with its PyTorch backend: {why}",
        name="tensorrt_llm",
    )


def version_notice(version: str) -> str:
    """A warning, in one line, for a release that was not read; empty for the others."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.?rc(\d+))?", version)
    if found is not None:
        release = int(found[1]), int(found[2]), int(found[3])
        candidate = int(found[4]) if found[4] else _FINAL
        if (_OLDEST, _OLDEST_CANDIDATE) <= (release, candidate) <= (_NEWEST, _NEWEST_CANDIDATE):
            return ""
    return f"TensorRT-LLM {version} is unknown to this kvbm, which was written from {TESTED}: it is tried"


def signature_notice(pairs: Iterable[tuple[type, type]]) -> str:
    """What differs between the installed base classes and our classes, in one line; empty where nothing does.

    `pairs` are (base class, our class). Named are methods of the base that ours inherits unimplemented, and methods
    that cannot be called as the base's are.
    """
    differing = [line for base, ours in pairs for line in _differences(base, ours)]
    if not differing:
        return ""
    return f"this TensorRT-LLM's connector interface differs from the one that is implemented: {'; '.join(differing)}"


def _differences(base: type, ours: type) -> Iterable[str]:
    for name, theirs in inspect.getmembers(base, callable):
        if name.startswith("_"):
            continue
        mine = getattr(ours, name)
        if mine is theirs:
            yield f"{base.__name__}.{name} is not implemented"
            continue
        wanted, have = _positional(theirs), _positional(mine)
        if wanted != have[: len(wanted)] or _required(mine) > len(wanted):
            yield f"{base.__name__}.{name}({', '.join(wanted)}), here ({', '.join(have)})"


def _positional(function: object) -> list[str]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in kinds and each.name != "self"]


def _required(function: object) -> int:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return sum(each.name != "self" and each.default is inspect.Parameter.empty for each in parameters)
