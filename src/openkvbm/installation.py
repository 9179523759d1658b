"""Whether the folder `kvbm` holds our files, all of them, and nobody else's. Standard library only.

What each distribution installed stands in its RECORD. A checkout and an editable install have none that names files of
`kvbm`, and nothing is wrong with them.
"""

from __future__ import annotations

import importlib.util
import os

OURS = "openkvbm"
THEIRS = "kvbm"
MEND = (
    "pip uninstall -y kvbm openkvbm, then install openkvbm again from where you had it "
    "(`pip install .` in its checkout, or its wheel)"
)
_FOLDER = "kvbm/"
_ONLY_OURS = "manager/process.py"
"""In every version of our `kvbm`, and in none of NVIDIA's."""


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
    """What is wrong with `kvbm` in this folder, in one line that says what mends it; empty when nothing is.

    With `read_files` a file that holds something else than what we installed is found too.
    """
    ours, theirs = _claims(site, OURS), _claims(site, THEIRS)
    shared = sorted(ours.keys() & theirs.keys())
    if shared:
        return (
            f"openkvbm and NVIDIA's kvbm are both installed in {site} and have {_some(shared)} in common, so that "
            f"what runs would be a mixture. Mend it with: {MEND}; or, to keep NVIDIA's, install kvbm again instead"
        )
    odd = sorted(
        path for path, digest in ours.items() if not _holds(site, path, digest if read_files else "")
    )
    if odd:
        return (
            f"{_some(odd)} of openkvbm in {site} {'are missing or were' if len(odd) > 1 else 'is missing or was'} "
            "changed, as when a package with files of the same names was installed or removed. "
            f"Mend it with: {MEND}"
        )
    return ""


def shadow(site: str) -> str:
    """What is wrong with another `kvbm` that `import kvbm` would find before ours, in one line; empty when nothing is.

    Another copy of our software, a checkout for instance, is what somebody who sets PYTHONPATH wants.
    """
    origin, folder = _found_instead(site)
    if not origin:
        return ""
    line = trouble(folder)
    if line:
        return line
    if f"{_FOLDER}__init__.py" in _claims(folder, THEIRS):
        mend = f"Mend it with: pip uninstall -y {THEIRS}"
    elif not _marked(origin):
        mend = f"Take {folder} from PYTHONPATH (sys.path), or give what lies there another name"
    else:
        return ""
    return f"`import kvbm` finds {origin}, which is not openkvbm's: that is in {site}. {mend}"


def other_copy(site: str) -> str:
    """One line when `import kvbm` finds another copy than ours, with which `shadow` finds nothing wrong; else empty."""
    origin, folder = _found_instead(site)
    if not origin:
        return ""
    return f"PYTHONPATH (sys.path) puts {folder} first: `kvbm` is taken from there, not from {site}"


def _found_instead(site: str) -> tuple[str, str]:
    """The file that `import kvbm` would run and the folder it is installed in; empty where these are ours."""
    try:
        spec = importlib.util.find_spec("kvbm")
    except ValueError:  # a stand-in that somebody put among the imported modules
        return "", ""
    if spec is None or spec.origin is None:
        return "", ""
    folder = os.path.dirname(os.path.realpath(spec.origin))
    if spec.submodule_search_locations is not None:
        folder = os.path.dirname(folder)
    return ("", "") if folder == os.path.realpath(site) else (spec.origin, folder)


def _marked(origin: str) -> bool:
    """Whether a package has a file that only ours has."""
    path = os.path.join(os.path.dirname(origin), _ONLY_OURS)
    return os.path.exists(path) or os.path.exists(f"{path}c")


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
