"""The releases of vLLM that this kvbm supports, and the one line for any other."""

from __future__ import annotations

import re

SUPPORTED = "0.28 to 0.32, and 0.33 untested"
OLDEST = (0, 28)


def refuse_old() -> None:
    """Raises ImportError, in one line, under a vLLM that is known to be too old. Imports vLLM."""
    if too_old(running_version()):
        raise unsupported()


def unsupported(lacking: ImportError | None = None) -> ImportError:
    """The one line; `lacking` is the import that this vLLM failed."""
    why = f" ({' '.join(str(lacking).split())})" if lacking is not None else ""
    return ImportError(f"vLLM {running_version()} is not supported by this kvbm: {SUPPORTED}{why}")


def running_version() -> str:
    """The version of this process's vLLM."""
    import vllm

    return str(getattr(vllm, "__version__", "of no version"))


def too_old(version: str) -> bool:
    """Whether this version is below all supported ones. A build of no release is not: it is tried."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return False
    release = int(found[1]), int(found[2])
    # Without its tags a checkout of vLLM calls itself 0.1.dev….
    return release < OLDEST and not (release <= (0, 1) and "dev" in version)
