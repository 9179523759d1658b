"""Checks that the folder `kvbm` holds all of our files and no others. Uses only the standard library.

A distribution's RECORD lists the files it installed. A checkout and an editable install have no RECORD with files of
`kvbm`, and pass the check.
"""

from __future__ import annotations

import importlib.util
import os

OURS = "openkvbm"
THEIRS = "kvbm"
REPAIR = (
    "pip uninstall -y kvbm openkvbm, then install openkvbm again from where you had it "
    "(`pip install .` in its checkout, or its wheel)"
)
_FOLDER = "kvbm/"
_ONLY_OURS = "manager/process.py"
"""In every version of our `kvbm`, and in none of NVIDIA's."""


class MixedInstallation(ImportError):
    """The package `kvbm` is not ours, or not complete. The message is one line that says what to do."""


def site_of_this() -> str:
    """The folder that this package was installed into."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def refuse_mixture() -> None:
    """Raise MixedInstallation if another distribution shares our folder, or files of ours are missing.

    `kvbm` itself calls this: it takes a few milliseconds, because it does not read the files.
    """
    line = problem(site_of_this(), read_files=False)
    if line:
        raise MixedInstallation(line)


def problem(site: str, read_files: bool = True) -> str:
    """One line about what is wrong with `kvbm` in this folder and how to repair it; empty if nothing is wrong.

    With `read_files`, files with other content than we installed are found too.
    """
    ours, theirs = _claims(site, OURS), _claims(site, THEIRS)
    shared = sorted(ours.keys() & theirs.keys())
    if shared:
        return (
            f"openkvbm and NVIDIA's kvbm are both installed in {site} and have {_some(shared)} in common, so that "
            f"what runs would be a mixture. Repair it with: {REPAIR}; or, to keep NVIDIA's, install kvbm again instead"
        )
    odd = sorted(
        path for path, digest in ours.items() if not _holds(site, path, digest if read_files else "")
    )
    if odd:
        return (
            f"{_some(odd)} of openkvbm in {site} {'are missing or were' if len(odd) > 1 else 'is missing or was'} "
            "changed, as when a package with files of the same names was installed or removed. "
            f"Repair it with: {REPAIR}"
        )
    return ""


def shadow(site: str) -> str:
    """One line about another package `kvbm` that `import kvbm` would find before ours; empty if nothing is wrong.

    Another copy of our software is right: a developer puts a checkout on PYTHONPATH on purpose.
    """
    origin, folder = _found_instead(site)
    if not origin:
        return ""
    line = problem(folder)
    if line:
        return line
    if f"{_FOLDER}__init__.py" in _claims(folder, THEIRS):
        repair = f"Repair it with: pip uninstall -y {THEIRS}"
    elif not _marked(origin):
        repair = f"Take {folder} from PYTHONPATH (sys.path), or give what lies there another name"
    else:
        return ""
    return f"`import kvbm` finds {origin}, which is not openkvbm's: that is in {site}. {repair}"


def other_copy(site: str) -> str:
    """One line if `import kvbm` finds another copy of our software than this one; else empty. See `shadow`."""
    origin, folder = _found_instead(site)
    if not origin:
        return ""
    return f"PYTHONPATH (sys.path) puts {folder} first: `kvbm` is taken from there, not from {site}"


def _found_instead(site: str) -> tuple[str, str]:
    """The file that `import kvbm` would run, and its folder; both empty if this is our folder."""
    try:
        spec = importlib.util.find_spec("kvbm")
    except ValueError:  # a module without a spec was put into sys.modules
        return "", ""
    if spec is None or spec.origin is None:
        return "", ""
    folder = os.path.dirname(os.path.realpath(spec.origin))
    if spec.submodule_search_locations is not None:
        folder = os.path.dirname(folder)
    return ("", "") if folder == os.path.realpath(site) else (spec.origin, folder)


def _marked(origin: str) -> bool:
    """Whether the package has a file that only our `kvbm` has."""
    path = os.path.join(os.path.dirname(origin), _ONLY_OURS)
    return os.path.exists(path) or os.path.exists(f"{path}c")


def _claims(site: str, distribution: str) -> dict[str, str]:
    """The modules below `kvbm/` in the RECORD of a distribution in this folder, each with its digest."""
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
        except OSError:  # packages of Linux distributions have no RECORD
            continue
        for row in rows:
            path, digest, _ = (*row.rsplit(",", 2), "", "")[:3]
            path = path.strip('"')
            if path.startswith(_FOLDER) and path.endswith((".py", ".so")):
                claims[path] = digest
    return claims


def _holds(site: str, path: str, digest: str) -> bool:
    """Whether the file exists and, if a digest is given, still has the installed content."""
    full = os.path.join(site, path)
    if not os.path.exists(full):
        return os.path.exists(f"{full}c")  # installed compiled, without its source
    algorithm, _, expected = digest.partition("=")
    if algorithm != "sha256":
        return True
    # Imported late: most calls do not need them.
    import base64
    import hashlib

    with open(full, "rb") as file:
        found = hashlib.sha256(file.read()).digest()
    return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == expected


def _some(paths: list[str]) -> str:
    return f"{len(paths)} file{'s' * (len(paths) > 1)} ({paths[0]}{', …' if len(paths) > 1 else ''})"
