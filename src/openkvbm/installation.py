"""Whether the folder `kvbm` holds our files, all of them, and nobody else's. Standard library only.

What each distribution installed stands in its RECORD. A checkout and an editable install have none that names files of
`kvbm`, and nothing is wrong with them.
"""

from __future__ import annotations

import importlib.util
import os

OURS = "openkvbm"
THEIRS = "kvbm"
MEND = "pip uninstall -y kvbm openkvbm && pip install openkvbm"
_FOLDER = "kvbm/"


class MixedInstallation(ImportError):
    """What would be imported as `kvbm` is not ours, or not all of it. The message is one line that says what to do."""


def site_of_this() -> str:
    """The folder that this package was installed into."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def refuse_mixture() -> None:
    """Raise MixedInstallation when another distribution shares our folder, or files of ours are missing.

    For `kvbm` itself to call: it takes a few milliseconds, and does not read the files.
    """
    line = trouble(site_of_this(), read_files=False)
    if line:
        raise MixedInstallation(line)


def trouble(site: str, read_files: bool = True) -> str:
    """What is wrong with `kvbm` in this folder, in one line with the commands that mend it; empty when nothing is.

    With `read_files` a file that holds something else than what we installed is found too.
    """
    ours, theirs = _claims(site, OURS), _claims(site, THEIRS)
    shared = sorted(ours.keys() & theirs.keys())
    if shared:
        return (
            f"openkvbm and NVIDIA's kvbm are both installed in {site} and have {_some(shared)} in common, so that "
            f"what runs would be a mixture. Mend it with: {MEND} (or, to keep NVIDIA's, put kvbm at its end)"
        )
    odd = sorted(
        path for path, digest in ours.items() if not _holds(site, path, digest if read_files else "")
    )
    if odd:
        return (
            f"{_some(odd)} of openkvbm in {site} are missing or were changed, as when a package with files of the same "
            f"names was installed or removed. Mend it with: {MEND}"
        )
    return ""


def shadow(site: str) -> str:
    """Another `kvbm` that `import kvbm` would find before ours, in one line as `trouble`; empty when there is none."""
    try:
        spec = importlib.util.find_spec("kvbm")
    except ValueError:  # a stand-in that somebody put among the imported modules
        return ""
    if spec is None or spec.origin is None:
        return ""
    found = os.path.dirname(os.path.dirname(os.path.realpath(spec.origin)))
    if found == os.path.realpath(site):
        return ""
    return (
        f"`import kvbm` finds {spec.origin}, which is not openkvbm's: that is in {site}. "
        f"Mend it with: pip uninstall -y {THEIRS}"
    )


def _claims(site: str, distribution: str) -> dict[str, str]:
    """The modules below `kvbm/` that a distribution in this folder says it installed, each with its digest."""
    claims: dict[str, str] = {}
    try:
        names = os.listdir(site)
    except OSError:
        return claims
    for name in names:
        if not name.endswith(".dist-info") or name.partition("-")[0].lower() != distribution:
            continue
        try:
            with open(os.path.join(site, name, "RECORD"), encoding="utf-8") as file:
                rows = file.read().splitlines()
        except OSError:  # a package of a Linux distribution has none
            continue
        for row in rows:
            path, digest, _ = (*row.rsplit(",", 2), "", "")[:3]
            path = path.strip('"')
            if path.startswith(_FOLDER) and path.endswith((".py", ".so")):
                claims[path] = digest
    return claims


def _holds(site: str, path: str, digest: str) -> bool:
    """Whether the file is there and, given a digest, holds what was installed."""
    full = os.path.join(site, path)
    if not os.path.exists(full):
        return os.path.exists(f"{full}c")  # compiled, without its source
    algorithm, _, expected = digest.partition("=")
    if algorithm != "sha256":
        return True
    # Only who asks for it pays for these.
    import base64
    import hashlib

    with open(full, "rb") as file:
        found = hashlib.sha256(file.read()).digest()
    return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == expected


def _some(paths: list[str]) -> str:
    return f"{len(paths)} file{'s' * (len(paths) > 1)} ({paths[0]}{', …' if len(paths) > 1 else ''})"
