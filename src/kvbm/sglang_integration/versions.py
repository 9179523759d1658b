"""Which SGLang this was written for and tested with."""

from __future__ import annotations

import functools
import logging
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger("kvbm.sglang")

TESTED = ("0.5.23",)


@functools.cache
def release() -> str:
    """SGLang's version; empty where it is installed without one."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


@functools.cache
def warn_if_untested() -> None:
    """One warning for a version that was not tested; it is tried all the same."""
    if release() not in TESTED:
        log.warning(
            "SGLang %s was not tested with KVBM; tested: %s",
            release() or "of unknown version",
            ", ".join(TESTED),
        )
