"""Which NIXL there is: it comes as one package for each major version of CUDA, and must fit the installed torch's."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from types import ModuleType

from kvbm.tiers.disk.block_io import DirectRefused

log = logging.getLogger("kvbm.tiers.disk.tier")

PACKAGES = ("nixl_cu13", "nixl_cu12")


def import_nixl() -> ModuleType:
    """The NIXL package that is installed, the one for torch's CUDA before another. Raises DirectRefused."""
    cuda = cuda_of_torch()
    failures = []
    for name in sorted(PACKAGES, key=lambda name: not name.endswith(f"_cu{cuda}")):
        try:
            package = _import_package(name)
        except DirectRefused as refused:
            failures.append(str(refused))
            continue
        if package is None:
            continue
        if cuda and not name.endswith(f"_cu{cuda}"):
            log.warning("%s is not for CUDA %d, which torch is built for; %s", name, cuda, install_hint(cuda))
        # It writes every step to the standard output otherwise.
        logging.getLogger("nixl").setLevel(max(logging.WARNING, logging.getLogger("nixl").level))
        return package
    if failures:
        raise DirectRefused("; ".join(failures))
    raise DirectRefused(f"NIXL is not installed; {install_hint(cuda)}")


def _import_package(name: str) -> ModuleType | None:
    """None where it is not installed. Raises DirectRefused where it is, and cannot be imported."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise DirectRefused(f"{name} cannot be imported ({error})") from error


def is_installed() -> bool:
    """Whether there is a NIXL package; it is not imported."""
    find_spec = importlib.import_module("importlib.util").find_spec
    return any(find_spec(name) is not None for name in PACKAGES)


def install_hint(cuda: int) -> str:
    """How to install the NIXL for this major version of CUDA; 0 is not known, and then for either."""
    if cuda:
        return f"pip install 'openkvbm[nixl-cu{cuda}]'"
    return "pip install 'openkvbm[nixl-cu12]' for CUDA 12, 'openkvbm[nixl-cu13]' for CUDA 13"


def cuda_of_torch() -> int:
    """The major version of the CUDA that the installed torch is built for: 12 or 13; 0 where that is not known.

    Read in the metadata of installed packages: torch itself is not imported.
    """
    metadata = importlib.import_module("importlib.metadata")
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return 0
    requirements = [f"+{torch.version.partition('+')[2]}", *(torch.requires or ())]
    for line in requirements:
        # "+cu130" of PyTorch's own index, or a requirement such as "nvidia-cudnn-cu13==9.19; …"
        found = re.match(r"\+cu(\d\d)\d|nvidia-[a-z-]+-cu(\d\d)\b", line)
        if found is not None:
            return _known(int(found[1] or found[2]))
    if torch.version.endswith("+cpu"):
        return 0  # a runtime that is installed all the same is not torch's
    for name, cuda in (("nvidia-cuda-runtime-cu12", 12), ("nvidia-cuda-runtime", 0)):
        try:
            version: str = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return cuda or _known(int(version.partition(".")[0]))
    return 0


def _known(cuda: int) -> int:
    """The version, if there is a NIXL for it."""
    return cuda if f"nixl_cu{cuda}" in PACKAGES else 0
